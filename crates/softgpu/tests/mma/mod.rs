//! `ldmatrix` and `mma.sync` by shuffles, so that the tiles for CUDA can be tried on the host.

/// Goes in front of a kernel text.
pub const PRELUDE: &str = r#"
#define ATTENTION_MMA 1
#define FLASH_PAD 0u
#include "emu.h"
#include <cstring>
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
// Under way until they are waited for, as with cp.async; of the header that follows.
#define flash_copy copy_async
#define flash_wait copy_wait
"#;
