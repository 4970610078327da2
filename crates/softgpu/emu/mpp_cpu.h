// What a staged product uses of Metal's tensors and tensor operations, on the host. C++20. Each kernel thread owns the elements
// i * threads + t of the destination; run() is no barrier, so that a missing one shows.
#include <array>
template <class I, int R> struct dextents {
  int e[R];
  template <class... A> dextents(A... a) : e{int(a)...} {}
};
struct tensor_inline {};
template <class T, class E, class D> struct tensor {
  using value_type = T;
  T *p;
  E extents;
  tensor(T *q, E x) : p(q), extents(x) {}
  T &at(int inner, int outer) const { return p[inner + outer * extents.e[0]]; }
};
template <int N> struct execution_simdgroups { static constexpr int size = N; };
namespace mpp::tensor_ops {
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool left, right, relaxed;
  mode md;
  constexpr matmul2d_descriptor(int m, int n, int k, bool left, bool right, bool relaxed, mode md)
      : m(m), n(n), k(k), left(left), right(right), relaxed(relaxed), md(md) {}
};
template <class T, int M, int N, int S> struct cooperative_tensor {
  static constexpr int threads = 32 * S;
  T v[(M * N + threads - 1) / threads];
  static int who() { return int(emu::lane() + 32 * (S == 1 ? 0 : emu::simd())); }
  int get_capacity() const { return (M * N + threads - 1) / threads; }
  bool is_valid_element(int i) const { return i * threads + who() < M * N; }
  std::array<int, 2> get_multidimensional_index(int i) const { const int e = i * threads + who(); return {e % N, e / N}; }
  T &operator[](int i) { return v[i]; }
};
template <matmul2d_descriptor D, class S> struct matmul2d {
  static_assert(D.m % 16 == 0 || D.n % 16 == 0, "M or N must be a multiple of 16");
  template <class A, class B, class T> auto get_destination_cooperative_tensor() const { return cooperative_tensor<T, D.m, D.n, S::size>(); }
  template <class A, class B, class C> void run(A &a, B &b, C &c) const {
    static_assert(std::is_same_v<typename A::value_type, typename B::value_type>, "inputs of one type");
    for (int i = 0; i < c.get_capacity(); i++) {
      if (!c.is_valid_element(i)) continue;
      const auto x = c.get_multidimensional_index(i);
      float s = D.md == matmul2d_descriptor::mode::multiply ? 0.0f : c[i];
      for (int k = 0; k < D.k; k++)
        s = fma(f32(D.left ? a.at(x[1], k) : a.at(k, x[1])), f32(D.right ? b.at(k, x[0]) : b.at(x[0], k)), s);
      c[i] = s;
    }
  }
};
}
