//! `ldmatrix` and `mma.sync` by shuffles, so that the tiles for CUDA can be tried on the host.

/// Goes in front of a kernel text.
pub const PRELUDE: &str = r#"
#define ATTENTION_MMA 1
#define FLASH_PAD 0u
#include "emu.h"
#include <cstring>
static inline float mma_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
static inline unsigned mma_shuffle(unsigned x, unsigned lane) { return emu::shuffle(x, lane, "mma", 1); }
template <class T> static inline const T *mma_row(const T *own, unsigned lane) {
  const unsigned long at = (unsigned long)own;
  const unsigned long low = mma_shuffle(unsigned(at), lane), high = mma_shuffle(unsigned(at >> 32), lane);
  return (const T *)(high << 32 | low);
}
// Lane l has elements 2 (l % 4) and the next of row l / 4 of matrix i, whose row r lies where lane 8 i + r says.
template <class T> static inline void flash_load(unsigned *r, const T *row) {
  const unsigned l = emu::lane();
  for (unsigned i = 0; i < 4; i++) {
    const T *from = mma_row(row, i * 8 + l / 4) + l % 4 * 2;
    memcpy(&r[i], from, 4);
  }
}
// Transposed: lane l has elements l / 4 of the rows 2 (l % 4) and the next.
template <class T> static inline void flash_load_transposed(unsigned *r, const T *row) {
  const unsigned l = emu::lane();
  for (unsigned i = 0; i < 4; i++) {
    unsigned short low, high;
    memcpy(&low, mma_row(row, i * 8 + l % 4 * 2) + l / 4, 2);
    memcpy(&high, mma_row(row, i * 8 + l % 4 * 2 + 1) + l / 4, 2);
    r[i] = low | unsigned(high) << 16;
  }
}
static inline void flash_copy(unsigned *to, const void *from, bool there) {
  if (there) memcpy(to, from, 16);
  else memset(to, 0, 16);
}
static inline void flash_wait() {}
// d[16][8] += a[16][16] · b[16][8]: lane l has of d and a rows l / 4 and + 8, columns 2 (l % 4) and the next (of a also + 8), of b
// the rows 2 (l % 4) and the next (and + 8) of column l / 4.
static inline void flash_multiply(float *d, const unsigned *a, unsigned b0, unsigned b1) {
  const unsigned l = emu::lane(), column = l % 4 * 2;
  for (unsigned k = 0; k < 16; k += 2) {
    const unsigned in = k % 8 / 2, from = l / 4 * 4 + in, high = k / 8;
    const unsigned low_rows = mma_shuffle(a[high * 2], from), high_rows = mma_shuffle(a[high * 2 + 1], from);
    const unsigned b = high ? b1 : b0, left = mma_shuffle(b, column * 4 + in), right = mma_shuffle(b, (column + 1) * 4 + in);
    for (unsigned e = 0; e < 2; e++) {
      const unsigned shift = 16 - 16 * e, mask = 0xffff0000u;
      const float x = mma_float(low_rows << shift & mask), y = mma_float(high_rows << shift & mask);
      const float p = mma_float(left << shift & mask), q = mma_float(right << shift & mask);
      d[0] += x * p; d[1] += x * q; d[2] += y * p; d[3] += y * q;
    }
  }
}
"#;
