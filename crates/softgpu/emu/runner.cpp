// Runs one command list in a process of its own, which a sanitizer may end: reads the job (see sanitize.rs), runs it, writes the buffers back.
// Before each dispatch it prints the kernel's name; an error of the emulator follows on a line of its own.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>
#if defined(EMU_ASAN)
extern "C" { void __asan_poison_memory_region(void const volatile *, size_t); void __asan_unpoison_memory_region(void const volatile *, size_t); }
#endif
extern "C" {
const char *lily_emu_launch(const char *, const uint32_t *, uint32_t, void **, uint32_t, int);
void lily_emu_barrier();
}
struct Buffer { std::string path; size_t bytes; char *data; };
struct Range { size_t buffer, offset, bytes; };
static void transfer(const Buffer &b, bool back) {
  FILE *f = fopen(b.path.c_str(), back ? "wb" : "rb");
  const size_t n = !f ? 0 : back ? fwrite(b.data, 1, b.bytes, f) : fread(b.data, 1, b.bytes, f);
  if (!f || fclose(f) || n != b.bytes) { fprintf(stderr, "%s: %zu of %zu bytes\n", b.path.c_str(), n, b.bytes); exit(3); }
}
// Under ASan a dispatch may touch what it binds and nothing else, in whole 8-byte units.
static void bind_only(const std::vector<Buffer> &buffers, const std::vector<Range> &ranges, bool on) {
#if defined(EMU_ASAN)
  for (const auto &r : ranges) { const auto &b = buffers[r.buffer]; if (on) __asan_poison_memory_region(b.data, b.bytes); else __asan_unpoison_memory_region(b.data, b.bytes); }
  if (on) for (const auto &r : ranges) __asan_unpoison_memory_region(buffers[r.buffer].data + r.offset, r.bytes);
#else
  (void)buffers; (void)ranges; (void)on;
#endif
}
int main(int argc, char **argv) {
  FILE *job = argc == 2 ? fopen(argv[1], "r") : nullptr;
  if (!job) { fprintf(stderr, "usage: runner JOB\n"); return 3; }
  std::vector<Buffer> buffers; char word[4096];
  while (fscanf(job, "%4095s", word) == 1) {
    if (!strcmp(word, "buffer")) {
      Buffer b; if (fscanf(job, "%zu %4095s", &b.bytes, word) != 2) return 3;
      b.path = word; b.data = (char *)malloc(b.bytes); transfer(b, false); buffers.push_back(b);   // the heap's redzones begin at its last byte
    } else if (!strcmp(word, "stage")) {
      lily_emu_barrier();
    } else if (!strcmp(word, "dispatch")) {
      std::string kernel; uint32_t g[3], threads, seed; int shuffle; size_t n, args_bytes;
      if (fscanf(job, "%4095s %u %u %u %u %u %d %zu", word, &g[0], &g[1], &g[2], &threads, &seed, &shuffle, &n) != 8) return 3;
      kernel = word; std::vector<Range> ranges(n);
      // Pointers and arguments stay: freeing them would be a write that no barrier orders after the kernel's reads.
      std::vector<void *> &slots = *new std::vector<void *>;
      for (auto &r : ranges) { if (fscanf(job, "%zu %zu %zu", &r.buffer, &r.offset, &r.bytes) != 3) return 3; slots.push_back(buffers[r.buffer].data + r.offset); }
      if (fscanf(job, "%zu", &args_bytes) != 1) return 3;
      unsigned char *args = (unsigned char *)malloc(args_bytes);
      for (size_t i = 0; i < args_bytes; i++) { unsigned v; if (fscanf(job, "%x", &v) != 1) return 3; args[i] = (unsigned char)v; }
      slots.push_back(args);
      printf("%s\n", kernel.c_str()); fflush(stdout);
      bind_only(buffers, ranges, true);
      const char *error = lily_emu_launch(kernel.c_str(), g, threads, slots.data(), seed, shuffle);
      bind_only(buffers, ranges, false);
      if (error) { fprintf(stderr, "%s\n", error); return 2; }
    } else return 3;
  }
  for (const auto &b : buffers) transfer(b, true);
  return 0;
}
