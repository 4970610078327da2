// What g++ calls in code built with -fsanitize=thread, in place of ThreadSanitizer: notes which dispatch reads and writes which
// bytes of the device's buffers, and the first access that no order allows.
#include <cstddef>
#include <cstdint>
#include <cstring>
namespace {
// The last writer and the last two readers of two bytes: numbers of dispatches, 0 for none.
struct Cell { uint32_t writer, reader[2]; };
struct Range { uintptr_t lo, hi, bound_lo; uint32_t bound; uint32_t buffer; Cell *cells; };
struct Found { uint32_t kind, buffer, other, write; uint64_t offset; };
struct Track {
  const Range *ranges; uint32_t count, self, fence, encoder, interval; const Range *last; Found found;
  // Whether a dispatch is not before this one by a fence or by a barrier of the encoder.
  bool beside(uint32_t other) const { return other && other != self && other >= fence && (other < encoder || other >= interval); }
};
thread_local Track t __attribute__((tls_model("initial-exec")));
void report(uint32_t kind, const Range &r, uintptr_t at, uint32_t other, bool write) {
  if (!t.found.kind) t.found = {kind, r.buffer, other, write, at - r.lo};
}
inline const Range *range(uintptr_t at) {
  if (t.last && at >= t.last->lo && at < t.last->hi) return t.last;
  if (!t.count || at < t.ranges[0].lo || at >= t.ranges[t.count - 1].hi) return nullptr;
  uint32_t lo = 0, hi = t.count;
  while (hi - lo > 1) { const uint32_t m = (lo + hi) / 2; if (t.ranges[m].lo <= at) lo = m; else hi = m; }
  return at < t.ranges[lo].hi ? t.last = &t.ranges[lo] : nullptr;
}
void access(const void *p, size_t n, bool write) {
  const uintptr_t at = (uintptr_t)p;
  const Range *r = range(at);
  if (!r) return;
  if (!r->bound || at < r->bound_lo || at + n > r->hi - 256) return report(2, *r, at, 0, write);
  for (uintptr_t i = (at - r->lo) / 2; i <= (at + n - 1 - r->lo) / 2; i++) {
    Cell &c = r->cells[i];
    if (t.beside(c.writer)) report(1, *r, at, c.writer, write);
    if (write) {
      for (uint32_t reader : c.reader) if (t.beside(reader)) report(1, *r, at, reader, write);
      c.writer = t.self;
    } else if (c.reader[0] != t.self) { c.reader[1] = c.reader[0]; c.reader[0] = t.self; }
  }
}
}
extern "C" {
// Before a dispatch: all buffers, by address. hi is 256 bytes behind a buffer's end.
void lily_track_begin(const Range *ranges, uint32_t count, uint32_t self, uint32_t fence, uint32_t encoder, uint32_t interval) {
  t = {ranges, count, self, fence, encoder, interval, nullptr, {}};
}
// After it: the first access that breaks a rule; kind 0 if none does.
void lily_track_end(Found *found) { *found = t.found; t = {}; }
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
#define ACCESS(n) \
  void __tsan_read##n(void *p) { access(p, n, false); } \
  void __tsan_write##n(void *p) { access(p, n, true); } \
  void __tsan_unaligned_read##n(void *p) { access(p, n, false); } \
  void __tsan_unaligned_write##n(void *p) { access(p, n, true); } \
  void __tsan_volatile_read##n(void *p) { access(p, n, false); } \
  void __tsan_volatile_write##n(void *p) { access(p, n, true); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __tsan_read_range(void *p, unsigned long n) { access(p, n, false); }
void __tsan_write_range(void *p, unsigned long n) { access(p, n, true); }
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
uint32_t __tsan_atomic32_fetch_add(volatile uint32_t *p, uint32_t v, int) { const uint32_t old = *p; *p = old + v; return old; }   // fibers do not switch here
uint8_t __tsan_atomic8_load(const volatile uint8_t *p, int) { return *p; }
}
