// Only in texts for measuring: reads memory and computes nothing that another kernel would.

// Packets of 16 bytes, spread over all threads of a grid of any shape; four are under way at a time. Their sums go nowhere unless
// `keep` is set, which the compiler cannot know.
KERNEL(read_bytes, 1024, IN(0, uint, slab), OUT(1, uint, out), ARGS(2, ReadArgs, p))
{
  const uint group = (k_group.z * k_groups.y + k_group.y) * k_groups.x + k_group.x;
  const ulong stride = ulong(k_groups.x) * k_groups.y * k_groups.z * p.threads;
  const ulong own = ulong(group) * p.threads + k_thread.x;
  const DEVICE uint *from = slab_words(slab, p.first);
  uint sum = 0;
  for (uint pass = 0; pass < p.passes; pass++) {
    ulong i = own;
    for (; i + 3 * stride < p.packets; i += 4 * stride) {
      const uint4 a = load4(from + i * 4), b = load4(from + (i + stride) * 4);
      const uint4 c = load4(from + (i + 2 * stride) * 4), d = load4(from + (i + 3 * stride) * 4);
      sum += (a.x ^ a.y ^ a.z ^ a.w) + (b.x ^ b.y ^ b.z ^ b.w) + (c.x ^ c.y ^ c.z ^ c.w) + (d.x ^ d.y ^ d.z ^ d.w);
    }
    for (; i < p.packets; i += stride) {
      const uint4 a = load4(from + i * 4);
      sum += a.x ^ a.y ^ a.z ^ a.w;
    }
  }
  if (p.keep != 0) out[own] = sum;
}
