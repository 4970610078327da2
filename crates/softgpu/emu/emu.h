// CPU emulator of GPU kernels: a fiber per kernel thread, one threadgroup at a time.
#pragma once
#include <cstddef>
#include <cstdint>
namespace emu {
struct Dim3 { uint32_t x, y, z; };
struct Ids { Dim3 group, thread, groups; uint32_t lane, simd; };
typedef void (*Body)(void *closure, const Ids &);
// A kernel of a text: registered by its KERNEL macro.
struct Entry {
  const char *name; Body body; uint32_t max_threads, slots, args_bytes; Entry *next; mutable bool waits = false;
  static Entry *&head();
  Entry(const char *n, Body b, uint32_t m, uint32_t s, uint32_t a) : name(n), body(b), max_threads(m), slots(s), args_bytes(a), next(head()) { head() = this; }
};
void *shared(const void *site, size_t bytes, size_t align, size_t limit = 32768);   // one block per SHARED site per threadgroup, NaN-filled; limit: of all together
void barrier(const char *file, int line, bool simd);
// Simd operations: each waits for the whole simdgroup; a lane elsewhere is an error. Float sums in butterfly order.
float sum(float v, const char *file, int line);
uint32_t sum(uint32_t v, const char *file, int line);
float max(float v, const char *file, int line);
uint32_t max(uint32_t v, const char *file, int line);
uint32_t min(uint32_t v, const char *file, int line);
uint32_t exclusive_sum(uint32_t v, const char *file, int line);
uint32_t shuffle(uint32_t v, uint32_t from, const char *file, int line);
// Copies of a kernel thread that are under way; from is null for zeros. `copied` gives the next one, if there is one but in the last `left` groups.
void copy_async(void *to, const void *from);
void copy_commit();
bool copied(void *&to, const void *&from, uint32_t left);
// Words that matrix units read (wgmma) until the kernel thread has waited for their products: `held` gives the next one and what it was, if there
// is one but in the last `left` groups; `changed` fails the launch, for one of them or for a result taken too early.
void hold(const uint32_t *at, uint32_t was);
void hold_commit();
bool held(const uint32_t *&at, uint32_t &was, uint32_t left);
void changed(const char *what);
void ready();   // see lily_emu_launch
void multiply16(const float ab[6], float d[4], const char *file, int line);   // pairs of bf16: four words of A, two of B
void mma8(const float abc[6], float d[2], const char *file, int line);   // two elements a lane of A, B, C
uint32_t lane();
uint32_t simd();
// Of the trace build: a kernel thread's access, the accesses of a simdgroup up to a point where its lanes meet, and whether an address is the
// thread's own or threadgroup memory.
void touch(const void *p, uint32_t bytes, bool stored, const void *site);
void simdgroup_met();
bool own_memory(const void *p);
}
