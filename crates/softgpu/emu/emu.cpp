#include "emu.h"
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <sys/mman.h>
#include <vector>
#if defined(EMU_TSAN)
extern "C" { void *__tsan_create_fiber(unsigned); void __tsan_destroy_fiber(void *); void __tsan_switch_to_fiber(void *, unsigned); void *__tsan_get_current_fiber();
void __tsan_acquire(void *); void __tsan_release(void *); }
#endif
#if defined(EMU_ASAN)
extern "C" { void __sanitizer_start_switch_fiber(void **, const void *, size_t); void __sanitizer_finish_switch_fiber(void *, const void **, size_t *); }
#endif
#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
// void emu_switch(void **save_sp, void *load_sp)
asm(R"(.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch,.-emu_switch
)");
extern "C" void emu_switch(void **, void *);
#define HAND 1
#else
#include <ucontext.h>
#endif
namespace emu {
Entry *&Entry::head() { static Entry *h; return h; }
enum St : uint8_t { RUN, AT_SIMD, AT_SIMDBAR, AT_BAR, DONE };
struct Copy { void *to; const void *from; uint32_t group; };
struct Word { const uint32_t *at; uint32_t was, group; };
struct Fiber {
  Copy copies[64]; uint32_t copying = 0, taken = 0, copy_group = 0;
  Word words[256]; uint32_t holding = 0, let_go = 0, word_group = 0;
  void *sp = nullptr; char *stack = nullptr; Ids ids; St st; const char *file; int line, op; uint32_t parity, nbar, nsimd;
  void *tsan = nullptr, *fake = nullptr;
#ifndef HAND
  ucontext_t uc;
#endif
};
static const size_t STACK =
#if defined(EMU_ASAN) || defined(EMU_TSAN)
  256 << 10;
#else
  64 << 10;
#endif
// Threadgroup memory: what is poisoned before a kernel has told, and what there is.
static const size_t SMALL = 32768, ARENA = 256 << 10;
struct Site { const void *key; size_t off, bytes; };
struct Stats { uint64_t threads, switches, barriers, simd_ops; };
struct World {
  std::vector<std::unique_ptr<Fiber>> f; Fiber *cur = nullptr; void *main_sp = nullptr; Body body; void *closure;
  std::vector<Site> sites; std::vector<uint32_t> order; char error[512]; bool failed = false, ready = false; char *arena; size_t used = 0, high = SMALL; Stats s{};
  float slot[2][32][32][6]; uint32_t active[32]; float memo[32]; bool have[32]; void *tsan_main = nullptr, *fake_main = nullptr; const void *mstk = nullptr; size_t msz = 0;
  uint64_t hb_group[2], hb_simd[32][2], hb_end;
#ifndef HAND
  ucontext_t main_uc;
#endif
  World() { arena = (char *)mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); }
};
static thread_local World *world __attribute__((tls_model("initial-exec")));
static inline World &W() { if (__builtin_expect(!world, 0)) world = new World; return *world; }
static void poison(char *p, size_t n) { for (size_t i = 0; i < n; i += 16) { *(uint64_t *)(p + i) = ~0ull; *(uint64_t *)(p + i + 8) = ~0ull; asm volatile("" ::: "memory"); } }   // not memset: TSan intercepts that
static void to_main(World &w) {
  Fiber *f = w.cur; w.s.switches++;
#if defined(EMU_TSAN)
  __tsan_switch_to_fiber(w.tsan_main, 1);
#endif
#if defined(EMU_ASAN)
  __sanitizer_start_switch_fiber(f->st == DONE ? nullptr : &f->fake, w.mstk, w.msz);
#endif
#ifdef HAND
  emu_switch(&f->sp, w.main_sp);
#else
  swapcontext(&f->uc, &w.main_uc);
#endif
#if defined(EMU_ASAN)
  __sanitizer_finish_switch_fiber(f->fake, &w.mstk, &w.msz);
#endif
}
static void entry() {
  World &w = W();
#if defined(EMU_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, &w.mstk, &w.msz);
#endif
  w.body(w.closure, w.cur->ids); w.cur->st = DONE;
#if defined(EMU_TSAN)
  __tsan_release(&w.hb_end);
#endif
  to_main(w); abort();
}
static void to_fiber(World &w, Fiber *f) {
  w.cur = f;
#if defined(EMU_TSAN)
  __tsan_switch_to_fiber(f->tsan, 1);
#endif
#if defined(EMU_ASAN)
  __sanitizer_start_switch_fiber(&w.fake_main, f->stack, STACK);
#endif
#ifdef HAND
  emu_switch(&w.main_sp, f->sp);
#else
  swapcontext(&w.main_uc, &f->uc);
#endif
#if defined(EMU_ASAN)
  __sanitizer_finish_switch_fiber(w.fake_main, nullptr, nullptr);
#endif
}
static void prepare(Fiber *f) {
#if defined(EMU_TSAN)
  if (f->tsan) __tsan_destroy_fiber(f->tsan);
  // A new mapping has no past: no false race with the last thread on this stack, and no edge from it that would hide a true one.
  mmap(f->stack, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  f->tsan = __tsan_create_fiber(0);
#endif
#ifdef HAND
  uintptr_t top = ((uintptr_t)f->stack + STACK) & ~(uintptr_t)15;
  void **p = (void **)top; *--p = nullptr; *--p = (void *)entry; for (int i = 0; i < 6; i++) *--p = nullptr;
  f->sp = p;
#else
  getcontext(&f->uc); f->uc.uc_stack.ss_sp = f->stack; f->uc.uc_stack.ss_size = STACK; f->uc.uc_link = nullptr; makecontext(&f->uc, entry, 0);
#endif
}
static void fail(World &w, const char *format, ...) {
  if (w.failed) return;   // the first error tells most
  w.failed = true;
  va_list v; va_start(v, format); vsnprintf(w.error, sizeof w.error, format, v); va_end(v);
}
static void die(World &w, const char *what, Fiber *a, Fiber *b) {
  static const char *n[] = {"running", "in a simd operation", "at a simdgroup barrier", "at a threadgroup barrier", "ended"};
  fail(w, "%s: thread %u is %s (%s:%d) while thread %u is %s (%s:%d)", what, a->ids.thread.x, n[a->st], a->file, a->line, b->ids.thread.x, n[b->st], b->file, b->line);
}
// Ends the running fiber after an error of its own.
[[noreturn]] static void end_fiber(World &w) { w.cur->st = DONE; to_main(w); abort(); }
struct Options { uint32_t seed; bool shuffle; };
static void launch(Dim3 G, Dim3 T, Body body, void *closure, const Options &o) {
  World &w = W(); w.body = body; w.closure = closure; w.failed = false;
  const uint32_t n = T.x * T.y * T.z, sgs = (n + 31) / 32;
  while (w.f.size() < n) { auto f = std::make_unique<Fiber>(); f->stack = (char *)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); w.f.push_back(std::move(f)); }
  for (uint32_t i = 0; i < n; i++) { Fiber *f = w.f[i].get(); f->ids.thread = {i % T.x, i / T.x % T.y, i / T.x / T.y}; f->ids.groups = G; f->ids.lane = i % 32; f->ids.simd = i / 32; }
#if defined(EMU_TSAN)
  w.tsan_main = __tsan_get_current_fiber();
#endif
  uint64_t rng = o.seed * 0x9E3779B97F4A7C15ull + 1;
  auto next = [&rng] { rng ^= rng << 13; rng ^= rng >> 7; rng ^= rng << 17; return (uint32_t)(rng >> 33); };
  const uint32_t groups = G.x * G.y * G.z;
  w.order.resize(groups); std::iota(w.order.begin(), w.order.end(), 0u);
  if (o.shuffle) for (uint32_t i = groups; i > 1; i--) std::swap(w.order[i - 1], w.order[next() % i]);
  for (uint32_t g : w.order) {
    const Dim3 at = {g % G.x, g / G.x % G.y, g / G.x / G.y};
#if defined(EMU_TSAN)
    munmap(w.arena, ARENA); w.arena = (char *)mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);   // new shadow: no false race with the last group
#endif
    poison(w.arena, w.high); w.high = w.used ? w.used : w.high; w.sites.clear(); w.used = 0;   // poison what the last group used
    for (uint32_t i = 0; i < n; i++) { Fiber *f = w.f[i].get(); f->ids.group = at; f->st = RUN; f->file = ""; f->line = 0; f->parity = f->nbar = f->nsimd = f->copying = f->taken = f->holding = f->let_go = 0; prepare(f); }
    w.s.threads += n;
    for (;;) {
      uint32_t first = 0;
      if (o.shuffle) first = next() % sgs;
      bool rev = o.shuffle && (rng & 1);
      for (uint32_t k = 0; k < sgs; k++) {
        const uint32_t sg = (first + (rev ? sgs - 1 - k : k)) % sgs, lo = sg * 32, hi = lo + 32 < n ? lo + 32 : n;
        for (;;) {
          uint32_t act = 0; St st = DONE; Fiber *ref = nullptr, *gone = nullptr;
          for (uint32_t i = lo; i < hi; i++) { Fiber *f = w.f[i].get(); if (f->st == RUN) to_fiber(w, f); if (w.failed) return; }
#if defined(EMU_TRACE)
          simdgroup_met();
#endif
          for (uint32_t i = lo; i < hi; i++) { Fiber *f = w.f[i].get(); if (f->st == DONE) { gone = f; continue; } act |= 1u << (i - lo);
            if (!ref) { ref = f; st = f->st; } else if (f->st != st || (st == AT_SIMD && (f->line != ref->line || f->file != ref->file || f->op != ref->op))) { die(w, "divergent simdgroup", ref, f); return; } }
          if (st != AT_SIMD && st != AT_SIMDBAR) break;
          if (gone) { die(w, "simdgroup not complete", ref, gone); return; }   // every lane reaches every simd operation
          w.active[sg] = act; w.have[sg] = false;
          for (uint32_t i = lo; i < hi; i++) if (w.f[i]->st == st) w.f[i]->st = RUN;
        }
      }
      Fiber *bar = nullptr, *done = nullptr;
      for (uint32_t i = 0; i < n; i++) { Fiber *f = w.f[i].get(); if (f->st == AT_BAR) { if (bar && (bar->line != f->line || bar->file != f->file)) { die(w, "threads wait at different barriers", bar, f); return; } bar = f; } else done = f; }
      if (!bar) break;
      if (done) { die(w, "barrier not reached by all threads", bar, done); return; }
      w.s.barriers++;
      for (uint32_t i = 0; i < n; i++) w.f[i]->st = RUN;
    }
  }
}
void *shared(const void *site, size_t bytes, size_t align, size_t limit) {
  World &w = W();
  for (auto &s : w.sites) if (s.key == site) return w.arena + s.off;
  size_t off = (w.used + align - 1) & ~(align - 1);
  if (off + bytes > limit) { fail(w, "more than %zu KiB of threadgroup memory", limit >> 10); end_fiber(w); }
  w.used = off + bytes; w.sites.push_back({site, off, bytes}); w.used = (w.used + 15) & ~(size_t)15; if (w.used > w.high) { poison(w.arena + w.high, w.used - w.high); w.high = w.used; } return w.arena + off;
}
// Copies are the kernel's, this list is not: ThreadSanitizer sees only the former.
__attribute__((noinline, no_sanitize("thread"))) void copy_async(void *to, const void *from) {
  World &w = W(); Fiber *f = w.cur;
  if (f->copying - f->taken == 64) { fail(w, "more than 64 copies under way"); end_fiber(w); }
  f->copies[f->copying++ % 64] = {to, from, f->copy_group};
}
__attribute__((noinline, no_sanitize("thread"))) void copy_commit() { W().cur->copy_group++; }
__attribute__((noinline, no_sanitize("thread"))) bool copied(void *&to, const void *&from, uint32_t left) {
  Fiber *f = W().cur;
  const Copy &c = f->copies[f->taken % 64];
  if (f->taken == f->copying || (left > 0 && c.group + left >= f->copy_group)) return false;
  to = c.to; from = c.from;
  f->taken++;
  return true;
}
__attribute__((noinline, no_sanitize("thread"))) void hold(const uint32_t *at, uint32_t was) {
  World &w = W(); Fiber *f = w.cur;
  if (f->holding - f->let_go == 256) { fail(w, "more products begun than matrix units have words for here"); end_fiber(w); }
  Word &word = f->words[f->holding++ % 256];
  word.at = at; word.was = was; word.group = f->word_group;
}
__attribute__((noinline, no_sanitize("thread"))) void hold_commit() { W().cur->word_group++; }
__attribute__((noinline, no_sanitize("thread"))) bool held(const uint32_t *&at, uint32_t &was, uint32_t left) {
  Fiber *f = W().cur;
  const Word &word = f->words[f->let_go % 256];
  if (f->let_go == f->holding || (left > 0 && word.group + left >= f->word_group)) return false;
  at = word.at; was = word.was;
  f->let_go++;
  return true;
}
void changed(const char *what) { World &w = W(); fail(w, "%s before the product was waited for", what); end_fiber(w); }
void barrier(const char *file, int line, bool simd) {
  World &w = W(); Fiber *f = w.cur; f->file = file; f->line = line; f->st = simd ? AT_SIMDBAR : AT_BAR;
#if defined(EMU_TSAN)
  // two in turn: a thread ahead must not lend its next barrier's edge to one still leaving this barrier
  void *hb = simd ? &w.hb_simd[f->ids.simd][f->nsimd++ & 1] : &w.hb_group[f->nbar++ & 1]; __tsan_release(hb);
#endif
  to_main(w);
#if defined(EMU_TSAN)
  __tsan_acquire(hb);
#endif
}
// Double buffered: a lane can be at most one operation ahead of another.
static float (*deposit(World &w, int op, const float *v, int n, const char *file, int line))[6] {
  Fiber *f = w.cur; f->parity ^= 1; float(*s)[6] = w.slot[f->parity][f->ids.simd];
  for (int i = 0; i < n; i++) s[f->ids.lane][i] = v[i];
  f->file = file; f->line = line; f->op = op; f->st = AT_SIMD; w.s.simd_ops++; to_main(w); return s;
}
// Kinds of reductions; each is computed by the first lane back, for all.
enum Kind { SUM_F, MAX_F, SUM_U, MAX_U, MIN_U, SCAN_U, SHUFFLE, MMA };
static uint32_t bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static float number(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
static uint32_t combine(Kind kind, uint32_t a, uint32_t b) {
  switch (kind) {
    case SUM_F: return bits(number(a) + number(b));
    case MAX_F: return number(b) > number(a) || number(a) != number(a) ? b : a;
    case MAX_U: return a > b ? a : b;
    case MIN_U: return a < b ? a : b;
    default: return a + b;
  }
}
static uint32_t reduce(uint32_t v, Kind kind, const char *file, int line) {
  World &w = W(); float x = number(v); float(*s)[6] = deposit(w, kind, &x, 1, file, line); const uint32_t sg = w.cur->ids.simd;
  if (w.have[sg]) return bits(w.memo[sg]);
  uint32_t t[32];
  for (int i = 0; i < 32; i++) t[i] = bits(s[i][0]);
  for (int m = 16; m; m >>= 1) for (int i = 0; i < m; i++) t[i] = combine(kind, t[i], t[i + m]);
  w.have[sg] = true; w.memo[sg] = number(t[0]); return t[0];
}
float sum(float v, const char *file, int line) { return number(reduce(bits(v), SUM_F, file, line)); }
float max(float v, const char *file, int line) { return number(reduce(bits(v), MAX_F, file, line)); }
uint32_t sum(uint32_t v, const char *file, int line) { return reduce(v, SUM_U, file, line); }
uint32_t max(uint32_t v, const char *file, int line) { return reduce(v, MAX_U, file, line); }
uint32_t min(uint32_t v, const char *file, int line) { return reduce(v, MIN_U, file, line); }
uint32_t exclusive_sum(uint32_t v, const char *file, int line) {
  World &w = W(); float x = number(v); float(*s)[6] = deposit(w, SCAN_U, &x, 1, file, line);
  uint32_t t = 0;
  for (uint32_t i = 0; i < w.cur->ids.lane; i++) t += bits(s[i][0]);
  return t;
}
uint32_t shuffle(uint32_t v, uint32_t from, const char *file, int line) {
  World &w = W(); float x; memcpy(&x, &v, 4); float(*s)[6] = deposit(w, SHUFFLE, &x, 1, file, line); uint32_t r; memcpy(&r, s[from], 4); return r;
}
static uint32_t mrow(uint32_t l) { return l >> 2; }
static uint32_t mcol(uint32_t l) { return (l & 3) * 2; }
static uint32_t mlane(uint32_t r, uint32_t c) { return r * 4 + (c >> 1); }
void mma8(const float *v, float *d, const char *file, int line) {
  World &w = W(); float(*s)[6] = deposit(w, MMA, v, 6, file, line); const uint32_t l = w.cur->ids.lane, r = mrow(l), q = mcol(l); float s0 = v[4], s1 = v[5];
  for (uint32_t k = 0; k < 8; k++) { const float a = s[mlane(r, k)][k & 1]; const float *b = s[mlane(k, q)] + 2; s0 = __builtin_fmaf(a, b[0], s0); s1 = __builtin_fmaf(a, b[1], s1); }
  d[0] = s0; d[1] = s1;
}
// mma.sync m16n8k16: lane l has of d and a rows l / 4 and + 8, columns 2 (l % 4) and the next (of a also + 8), of b the rows 2 (l % 4) and
// the next (and + 8) of column l / 4.
void multiply16(const float *v, float *d, const char *file, int line) {
  World &w = W(); float(*s)[6] = deposit(w, MMA, v, 6, file, line); const uint32_t l = w.cur->ids.lane;
  const auto element = [s](uint32_t lane, uint32_t word, uint32_t k) { uint32_t u; memcpy(&u, &s[lane][word], 4); u = k & 1 ? u & 0xffff0000u : u << 16; float x; memcpy(&x, &u, 4); return x; };
  for (uint32_t i = 0; i < 4; i++) {
    const uint32_t row = l / 4, n = l % 4 * 2 + i % 2; float sum = d[i];
    for (uint32_t k = 0; k < 16; k++) { const uint32_t at = k % 8 / 2; sum = __builtin_fmaf(element(row * 4 + at, k / 8 * 2 + i / 2, k), element(n * 4 + at, 4 + k / 8, k), sum); }
    d[i] = sum;
  }
}
void ready() { W().ready = true; }
uint32_t lane() { return W().cur->ids.lane; }
uint32_t simd() { return W().cur->ids.simd; }
#if defined(EMU_TRACE)
bool own_memory(const void *p) {
  const World &w = W(); const char *at = (const char *)p;
  return size_t(at - w.cur->stack) < STACK || size_t(at - w.arena) < ARENA;
}
#endif
}
// The interface to the host program.
using namespace emu;
static const Entry *find(const char *name) { for (Entry *e = Entry::head(); e; e = e->next) if (!strcmp(e->name, name)) return e; return nullptr; }
extern "C" {
// What a kernel takes: buffers and arguments together, bytes of the arguments, threads at most. 0 if there is none of that name.
int lily_emu_kernel(const char *name, uint32_t *slots, uint32_t *args_bytes, uint32_t *max_threads) {
  const Entry *e = find(name); if (!e) return 0;
  *slots = e->slots; *args_bytes = e->args_bytes; *max_threads = e->max_threads; return 1;
}
// Runs a kernel; null if it ended well, else what went wrong. shuffle: threadgroups and simdgroups in random order.
const char *lily_emu_launch(const char *name, const uint32_t *groups, uint32_t threads, void **slots, uint32_t seed, int shuffle) {
  const Entry *e = find(name); if (!e) return "there is no such kernel";
  World &w = W();
  if (threads == 0 || threads > e->max_threads) { w.failed = false; fail(w, "%u threads, the kernel takes at most %u", threads, e->max_threads); return w.error; }
  w.ready = false;
  launch({groups[0], groups[1], groups[2]}, {threads, 1, 1}, e->body, slots, {seed, shuffle != 0});
  // A kernel that starts early must not end before the one before it: the next one waits for this one alone.
  if (w.ready) e->waits = true;
  else if (e->waits && !w.failed) fail(w, "no threadgroup came to inputs_ready()");
  return w.failed ? w.error : nullptr;
}
// Ends a stage: what its dispatches wrote is visible to those of the next.
void lily_emu_barrier() {
#if defined(EMU_TSAN)
  __tsan_acquire(&W().hb_end);
#endif
}
// Threads, switches, barriers and simd operations so far.
void lily_emu_stats(uint64_t *four) { const auto &s = W().s; four[0] = s.threads; four[1] = s.switches; four[2] = s.barriers; four[3] = s.simd_ops; }
}
