// Mistakes that the check must name: each line marked `bad`, and no other.
FN float fine(const DEVICE float *p, THREAD float &sum, const TG float *t) { sum += p[0] + t[0]; return sum; }
FN float pointer(const float *p) { return p[0]; } // bad
FN void reference(float &x) { x = 1.0f; } // bad
template <class T> FN T in_template(const T *p) { return *p; } // bad
FN float *returned(THREAD float *p) { return p; } // bad
struct Holds { const float *p; }; // bad
FN void written(CONSTANT FillArgs &p) { p.words = 1; } // bad
KERNEL(space_mistakes, 64, IN(0, float, a), OUT(1, float, y), ARGS(2, FillArgs, p)) {
  SHARED(float, t, 32);
  float x = 0.0f;
  const float *q = &x; // bad
  y[0] = fine(a, x, t);
  y[1] = fine(t, x, t); // bad
  y[2] = q[0];
  THREAD float *r = (THREAD float *)a; // bad
  a[0] = 1.0f; // bad
}
