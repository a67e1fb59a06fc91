// What several kernels share: ranks, reductions over a threadgroup, addressed noise.
// A pointer is always a template parameter: its address space differs between inputs, outputs and threadgroup arrays.

// Stands in for an input that was not given, and for its shape; the template says that it is not read.
struct Absent {
  inline int operator[](ulong) const {
    return 0;
  }
  inline Absent operator+(ulong) const {
    return *this;
  }
};

// Stands in for an array whose elements are all alike.
struct Same {
  int x;
  inline int operator[](ulong) const {
    return x;
  }
};

template <typename P>
inline P either(bool first, P one, P other) {
  return first ? one : other;
}

template <typename P>
inline P either(bool, Absent, P other) {
  return other;
}

template <typename T, int n>
inline Held<T, n> load_held(Absent) {
  return Held<T, n>{};
}

// ---- The order in which slots are freed: (class, importance, position), lowest first, as one 64-bit number in halves.

struct Rank {
  uint high;
  uint low;
  uint slot;
};

inline bool below(Rank a, Rank b) {
  return a.high != b.high ? a.high < b.high : (a.low != b.low ? a.low < b.low : a.slot < b.slot);
}

inline Rank last_rank() {
  return Rank{0xFFFFFFFFu, 0xFFFFFFFFu, 0xFFFFFFFFu};
}

// A number, but NaN, as a whole one in the same order; -0 is 0.
inline uint ordinal(float x) {
  const uint bits = as_type<uint>(x + 0.0f);
  return (bits >> 31) ? 0xFFFFFFFFu - bits : bits | 0x80000000u;
}

// Classes: 0 free, 1 NaN, 2 unprotected, 3 protected. Ties in importance: the oldest.
inline Rank rank_of(float importance, int position, int seen, int sink, int recent, uint slot) {
  if (position < 0) return Rank{0u, 0u, slot};
  const bool nan = isnan(importance);
  const uint kind = (position < sink || position >= seen - recent) ? 3u : (nan ? 1u : 2u);
  const uint place = ordinal(nan ? 0.0f : importance);
  return Rank{(kind << 30) | (place >> 2), (place << 30) | uint(position), slot};
}

// Where a slot comes when targets are chosen for a loser that was at `born`: slots after it in time by their positions,
// then the others by their places, the loser's own slot `lost` never.
inline uint turn_of(int position, int born, uint slot, uint lost) {
  if (slot == lost) return 0xFFFFFFFFu;
  return position > born ? uint(position) : 0x80000000u + slot;
}

// Importance of a slot: its mass, per query that has seen it where `age` > 0, plus noise (0 where there is none).
inline float importance_of(float mass, int age, bool keep_low, float noise) {
  float importance = age > 0 ? mass / float(age) : mass;
  if (keep_low) importance = -importance;
  return importance + noise;
}

inline Rank simd_lowest(Rank mine) {
  const uint high = simd_min(mine.high);
  const uint low = simd_min(mine.high == high ? mine.low : 0xFFFFFFFFu);
  const uint slot = simd_min(mine.high == high && mine.low == low ? mine.slot : 0xFFFFFFFFu);
  return Rank{high, low, slot};
}

// The lowest rank of a threadgroup, to all lanes. `shared` is a threadgroup array of 96 uint; a barrier comes first and
// last, so it can be used again at once.
template <typename P>
inline Rank lowest(Rank mine, P shared, uint lane, uint lanes) {
  const uint group = lane / 32, groups = (lanes + 31) / 32;
  mine = simd_lowest(mine);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane % 32 == 0) {
    shared[group] = mine.high;
    shared[32 + group] = mine.low;
    shared[64 + group] = mine.slot;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Rank best = last_rank();
  if (lane % 32 < groups) best = Rank{shared[lane % 32], shared[32 + lane % 32], shared[64 + lane % 32]};
  best = simd_lowest(best);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return best;
}

// The first free slot of a row, which has one, to all lanes. `shared` is a threadgroup array of 96 uint.
template <typename P, typename S>
inline uint first_free(P positions, uint length, S shared, uint lane, uint lanes) {
  Rank mine = last_rank();
  for (uint j = lane; j < length; j += lanes) {
    const Rank other = Rank{positions[j] < 0 ? 0u : 1u, 0u, j};
    if (below(other, mine)) mine = other;
  }
  return lowest(mine, shared, lane, lanes).slot;
}

// The sum of a threadgroup, to all lanes. `shared` is a threadgroup array of 32 float; a barrier comes first, so it can be
// used again at once.
template <typename P>
inline float sum_of(float mine, P shared, uint lane, uint lanes) {
  mine = simd_sum(mine);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane % 32 == 0) shared[lane / 32] = mine;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane % 32 < (lanes + 31) / 32 ? float(shared[lane % 32]) : 0.0f);
}

// ---- Noise: a hash of (64-bit name, position), bit for bit that of veloxfn/ops/noise.py.

inline uint keyed(uint low, uint high, int position) {
  uint x = uint(position) + low;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) + high;
  x = (x ^ (x >> 16)) * 0x846CA68Bu;
  x = (x ^ (x >> 15)) * 0x7FEB352Du;
  return x ^ (x >> 16);
}

inline float hashed_uniform(uint low, uint high, int position) {
  return (float(keyed(low, high, position) >> 9) + 0.5f) * 1.1920928955078125e-7f;
}

inline float hashed_gumbel(uint low, uint high, int position) {
  return -log(-log(hashed_uniform(low, high, position)));
}

// The 64-bit name of an address, coordinate by coordinate: that of veloxfn/draws.py. A seed is its two halves.
inline ulong mixed(ulong x) {
  x = (x ^ (x >> 27)) * 0x3C79AC492BA7B653ul;
  x = (x ^ (x >> 33)) * 0x1C69B3F74AC4AE35ul;
  return x ^ (x >> 27);
}

template <typename P>
inline ulong name_of(P seed) {
  return mixed(((ulong(seed[1]) << 32) | ulong(seed[0])) + 0x1E3779B97F4A7C15ul);
}

inline ulong named(ulong name, uint coordinate) {
  return mixed(name + (ulong(coordinate) + 1) * 0x1E3779B97F4A7C15ul);
}

// Temperature after t queries: from `first`, over `steps` queries from `start` on, by `rise`.
inline float temperature(float first, float rise, int steps, int start, int t) {
  if (steps == 0) return first;
  return first + product(float(min(max(t - start, 0), steps)) / float(steps), rise);
}

// ---- Arithmetic.

// Euclidean norm of rows[start .. start + dims - 1], by one SIMD group, to all of its lanes.
template <typename P>
inline float norm_of(P rows, ulong start, uint dims, uint lane) {
  float sum = 0.0f;
  for (uint d = lane; d < dims; d += 32) {
    const float x = float(rows[start + d]);
    sum = fma(x, x, sum);
  }
  return sqrt(simd_sum(sum));
}

// Cosine of rows[one ..] of norm `norm` and rows[other ..], likewise; not finite where a row is 0.
template <typename P>
inline float cosine_of(P rows, ulong one, ulong other, uint dims, uint lane, float norm) {
  float sum = 0.0f;
  for (uint d = lane; d < dims; d += 32) sum = fma(float(rows[one + d]), float(rows[other + d]), sum);
  sum = simd_sum(sum);
  return sum / (norm * norm_of(rows, other, dims, lane));
}

// Half an infinity is infinite, too: NaN and infinities fail this test.
inline bool finite(float x) {
  return fabs(x) < INFINITY;
}

// The first `count` elements of `from`, copied to `to` by `lanes` lanes in loads of n, which divides them.
template <typename T, int n, typename P, typename O>
inline void copy_packed(P from, O to, uint count, uint lane, uint lanes) {
  constexpr int U = 8;
  const uint last = count / n - 1;
  for (uint begin = lane; n * begin < count; begin += U * lanes) {
    Held<T, n> x[U];
    for (int u = 0; u < U; u++) x[u] = load_held<T, n>(from + n * min(begin + u * lanes, last));
    for (int u = 0; u < U; u++) {
      if (begin + u * lanes <= last) store_held<T, n>(to + n * (begin + u * lanes), x[u]);
    }
  }
}
