// What kernels touch in memory. The lanes of a simdgroup that run the same instruction for the same time since they last met make one
// access of it: bytes that several of them read count once, and so do lines. Threads' own and threadgroup memory are left out.
#include "emu.h"
#include <algorithm>
#include <unordered_map>
#include <vector>
namespace emu {
struct Counts { uint64_t bytes, accesses, lines, ideal_lines; };
// Bytes of a buffer that are counted together; a bit a byte of what was loaded and stored. Lines begin where the buffer does: a device
// aligns it so.
struct Region { uintptr_t base; uint64_t bytes; uintptr_t buffer; uint64_t *touched[2]; Counts counts[2]; };
struct Place { std::vector<uintptr_t> at[32]; uint32_t bytes; bool stored, used; };
static const uint64_t LINE = 128;
static thread_local Region *regions; static thread_local uint64_t region_count; static thread_local Region *last;
static thread_local std::unordered_map<const void *, Place> places;
static thread_local std::vector<Place *> met;
static Region *find(uintptr_t p) {
  if (last && p - last->base < last->bytes) return last;
  Region *end = regions + region_count, *r = std::upper_bound(regions, end, p, [](uintptr_t x, const Region &r) { return x < r.base; });
  if (r == regions || p - (r - 1)->base >= (r - 1)->bytes) return nullptr;
  return last = r - 1;
}
void touch(const void *p, uint32_t bytes, bool stored, const void *site) {
  if (!region_count || own_memory(p)) return;
  if (!find((uintptr_t)p)) return;
  Place &place = places[site];
  if (!place.used) met.push_back(&place);
  place.used = true; place.bytes = bytes; place.stored = stored; place.at[lane()].push_back((uintptr_t)p);
}
static void mark(Region &r, bool stored, uintptr_t first, uintptr_t end) {
  uint64_t *bits = r.touched[stored], a = first - r.base, b = end - r.base;
  for (; a < b && a % 64; a++) bits[a / 64] |= 1ull << a % 64;
  for (; a + 64 <= b; a += 64) bits[a / 64] = ~0ull;
  for (; a < b; a++) bits[a / 64] |= 1ull << a % 64;
}
// One access: addresses in order, all of one region.
static void count(Region &r, const Place &p, const uintptr_t *at, uint32_t n) {
  Counts &c = r.counts[p.stored]; uint64_t bytes = 0, lines = 0, line = 0;
  for (uint32_t i = 0; i < n;) {
    const uintptr_t first = at[i]; uintptr_t end = first + p.bytes;
    for (i++; i < n && at[i] <= end; i++) end = std::max(end, at[i] + p.bytes);
    end = std::min(end, r.base + r.bytes);
    const uint64_t a = (first - r.buffer) / LINE, b = (end - 1 - r.buffer) / LINE;
    lines += b - a + 1 - (lines && a == line); line = b; bytes += end - first;
    mark(r, p.stored, first, end);
  }
  c.bytes += bytes; c.accesses++; c.lines += lines; c.ideal_lines += (bytes + LINE - 1) / LINE;
}
void simdgroup_met() {
  for (Place *p : met) {
    size_t times = 0;
    for (const auto &a : p->at) times = std::max(times, a.size());
    for (size_t t = 0; t < times; t++) {
      uintptr_t at[32]; uint32_t n = 0;
      for (const auto &a : p->at) if (t < a.size()) at[n++] = a[t];
      std::sort(at, at + n);
      for (uint32_t first = 0, end; first < n; first = end) {
        Region &r = *find(at[first]);
        for (end = first + 1; end < n && at[end] - r.base < r.bytes;) end++;
        count(r, *p, at + first, end - first);
      }
    }
    for (auto &a : p->at) a.clear();
    p->used = false;
  }
  met.clear();
}
}
extern "C" {
// The regions of what follows, by base.
void lily_emu_trace(emu::Region *regions, uint64_t count) { emu::regions = regions; emu::region_count = count; emu::last = nullptr; }
#define HOOK(bytes) \
  void __sanitizer_cov_load##bytes(void *p) { emu::touch(p, bytes, false, __builtin_return_address(0)); } \
  void __sanitizer_cov_store##bytes(void *p) { emu::touch(p, bytes, true, __builtin_return_address(0)); }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)
}
