// What Metal, or this dialect, does not have: each line marked `bad`, and no other.
struct Member {
  float v;
  float get() { return v; } // bad
};
KERNEL(language_mistakes, 64, IN(0, float, a), OUT(1, float, y), ARGS(2, FillArgs, p)) {
  double wide = 1.0f; // bad
  y[0] = a[0] * 2.0; // bad
  y[1] = sin(a[1]) * 2.0f;
  auto f = [&](uint i) { return a[i]; }; // bad
  static float kept = 0.0f; // bad
  y[2] = new float(1.0f)[0]; // bad
  int n = 4;
  float variable[n]; // bad
  goto end; // bad
end:
  y[3] = 0.0f;
}
