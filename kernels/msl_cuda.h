// Metal's vocabulary for CUDA: the bodies in metal/ compile unchanged behind this header.
#define threadgroup __shared__

#define thread_position_in_threadgroup threadIdx
#define threadgroup_position_in_grid blockIdx
#define threads_per_threadgroup blockDim
#define threadgroups_per_grid gridDim
#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fc00000)
#endif

typedef unsigned int uint;
typedef unsigned long long ulong;

enum class mem_flags { mem_none, mem_device, mem_threadgroup };

__device__ __forceinline__ void threadgroup_barrier(mem_flags flags) {
  if (flags == mem_flags::mem_device) __threadfence_block();
  __syncthreads();
}
__device__ __forceinline__ void simdgroup_barrier(mem_flags) { __syncwarp(); }

template <typename T> __device__ __forceinline__ T simd_shuffle_xor(T x, unsigned mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
template <typename T> __device__ __forceinline__ T simd_shuffle(T x, unsigned lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}
template <typename T> __device__ __forceinline__ T simd_broadcast(T x, unsigned lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}
template <typename T> __device__ __forceinline__ T simd_sum(T x) {
  for (int m = 16; m > 0; m >>= 1) x += __shfl_xor_sync(0xffffffffu, x, m);
  return x;
}
// Whole numbers are reduced by one instruction from Ampere on, and so is the maximum of floats, as numbers in their order.
__device__ __forceinline__ uint simd_min(uint x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_min_sync(0xffffffffu, x);
#else
  for (int m = 16; m > 0; m >>= 1) x = min(x, __shfl_xor_sync(0xffffffffu, x, m));
  return x;
#endif
}
__device__ __forceinline__ float simd_max(float x) {
#if __CUDA_ARCH__ >= 800
  const uint bits = __float_as_uint(x);
  const uint top = __reduce_max_sync(0xffffffffu, bits >> 31 ? ~bits : bits | 0x80000000u);
  return __uint_as_float(top >> 31 ? top & 0x7fffffffu : ~top);
#else
  for (int m = 16; m > 0; m >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, m));
  return x;
#endif
}

template <typename To, typename From> __device__ __forceinline__ To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  memcpy(&to, &x, sizeof(To));
  return to;
}

// A product that is rounded by itself, never fused with an addition behind it.
__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }

// n elements, in registers as they came.
template <typename T, int n> struct alignas(n * sizeof(T) <= 16 ? n * sizeof(T) : 16) Packed { T at[n]; };

// Elements at .. at + n - 1 of a row of `dims`, 0 behind its end: one load where n divides dims. n is a power of two, n
// elements are 16 bytes at most, and `at` is a multiple of n.
template <typename T, int n, int dims> __device__ __forceinline__ Packed<T, n> load_packed(const T* row, uint at) {
  Packed<T, n> x;
  if constexpr (dims % n == 0) {
    if (at < dims) return *reinterpret_cast<const Packed<T, n>*>(row + at);
  }
#pragma unroll
  for (int i = 0; i < n; i++) x.at[i] = dims % n != 0 && at + i < dims ? row[at + i] : T(0.0f);
  return x;
}

// The same n elements, but those behind the end, to a row of `dims`.
template <typename T, int n, int dims, typename P>
__device__ __forceinline__ void store_packed(P row, uint at, Packed<T, n> x) {
  if constexpr (dims % n == 0) {
    if (at < dims) *reinterpret_cast<Packed<T, n>*>(row + at) = x;
  } else {
#pragma unroll
    for (int i = 0; i < n; i++) {
      if (at + i < dims) row[at + i] = x.at[i];
    }
  }
}

// n elements for long: in whole words, since the compiler would give a half a register of its own.
template <typename T, int n> struct alignas(n * sizeof(T) < 4 ? 4 : n * sizeof(T)) Held {
  uint words[(n * sizeof(T) + 3) / 4];
};

// From `from` and to `to`, aligned to n elements: one load, one store.
template <typename T, int n> __device__ __forceinline__ Held<T, n> load_held(const T* from) {
  if constexpr (n * sizeof(T) < 4) {
    return Held<T, n>{*reinterpret_cast<const unsigned short*>(from)};
  } else {
    return *reinterpret_cast<const Held<T, n>*>(from);
  }
}
template <typename T, int n, typename P> __device__ __forceinline__ void store_held(P to, Held<T, n> x) {
  if constexpr (n * sizeof(T) < 4) {
    *reinterpret_cast<unsigned short*>(to) = x.words[0];
  } else {
    *reinterpret_cast<Held<T, n>*>(to) = x;
  }
}
template <typename T, int n> __device__ __forceinline__ float element(Held<T, n> x, int i) {
  if constexpr (sizeof(T) == 4) {
    return as_type<float>(x.words[i]);
  } else {
    const unsigned short bits = i % 2 ? x.words[i / 2] >> 16 : x.words[i / 2];
    return float(as_type<T>(bits));
  }
}

// n consecutive elements at `from` as float in to[0 .. n - 1]; n is a power of two where it matters, and `from` aligned to it.
template <int n, typename E, typename A> __device__ __forceinline__ void load_floats(const E* from, A to) {
  if constexpr ((n & (n - 1)) == 0) {
    const Packed<E, n> packed = *reinterpret_cast<const Packed<E, n>*>(from);
#pragma unroll
    for (int i = 0; i < n; i++) to[i] = float(packed.at[i]);
  } else {
#pragma unroll
    for (int i = 0; i < n; i++) to[i] = float(from[i]);
  }
}

// Helper functions of the bodies are device functions; nothing is included after this.
#define inline __device__ __forceinline__
