// What the kernels need beyond Metal's own vocabulary, for Metal.
#include <metal_stdlib>
using namespace metal;
#pragma METAL fp contract(off)

// A product that is rounded by itself, never fused with an addition behind it.
inline float product(float a, float b) {
  return a * b;
}

// n consecutive elements at `from` as float in to[0 .. n - 1].
template <int n, typename P, typename A>
inline void load_floats(P from, A to) {
  for (int i = 0; i < n; i++) to[i] = float(from[i]);
}
