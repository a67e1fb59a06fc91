// What the kernels need beyond Metal's own vocabulary, for Metal.
#include <metal_stdlib>
using namespace metal;
#pragma METAL fp contract(off)

// A product that is rounded by itself, never fused with an addition behind it.
inline float product(float a, float b) {
  return a * b;
}

// n elements, in registers as they came.
template <typename T, int n>
struct Packed {
  T at[n];
};

// Elements at .. at + n - 1 of a row of `dims`, 0 behind its end.
template <typename T, int n, int dims, typename P>
inline Packed<T, n> load_packed(P row, uint at) {
  Packed<T, n> x;
  for (int i = 0; i < n; i++) x.at[i] = at + i < uint(dims) ? T(row[at + i]) : T(0.0f);
  return x;
}

// The same n elements, but those behind the end, to a row of `dims`.
template <typename T, int n, int dims, typename P>
inline void store_packed(P row, uint at, Packed<T, n> x) {
  for (int i = 0; i < n; i++) {
    if (at + i < uint(dims)) row[at + i] = x.at[i];
  }
}

// n elements for long, from `from` and to `to`, aligned to them.
template <typename T, int n>
using Held = Packed<T, n>;

template <typename T, int n, typename P>
inline Held<T, n> load_held(P from) {
  return load_packed<T, n, n>(from, 0);
}

template <typename T, int n, typename P>
inline void store_held(P to, Packed<T, n> x) {
  for (int i = 0; i < n; i++) to[i] = x.at[i];
}

template <typename T, int n>
inline float element(Packed<T, n> x, int i) {
  return float(x.at[i]);
}

// n consecutive elements at `from` as float in to[0 .. n - 1].
template <int n, typename P, typename A>
inline void load_floats(P from, A to) {
  for (int i = 0; i < n; i++) to[i] = float(from[i]);
}
