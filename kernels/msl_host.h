// Metal's vocabulary for g++: the bodies in metal/ compile unchanged behind this header, and veloxfn/testing/emulation.py
// runs them. Every lane is a fiber that runs up to the next barrier or simd operation; the order of the lanes in between
// is the run's choice. Device arrays are pointers that know their range.
#include <stdint.h>
#if !defined(__x86_64__) || defined(VELOXFN_UCONTEXT)
#include <ucontext.h>
#endif

extern "C" int snprintf(char*, __SIZE_TYPE__, const char*, ...) noexcept;
extern "C" char __start_threadgroup_memory[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_threadgroup_memory[] __attribute__((weak, visibility("hidden")));

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

struct uint2 { uint x, y; };
struct uint3 { uint x, y, z; };

// ---- fibers ----

#if defined(__x86_64__) && !defined(VELOXFN_UCONTEXT)
// Ten times as fast as ucontext, which asks the kernel to keep signal masks.
asm(R"(
.text
.type veloxfn_switch, @function
veloxfn_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace host {
struct fiber { void* stack; };
extern "C" __attribute__((visibility("hidden"))) void veloxfn_switch(fiber* from, fiber* to);
inline void swap(fiber* from, fiber* to) { veloxfn_switch(from, to); }
inline void prepare(fiber* one, char* stack, size_t size, void (*entry)()) {
  // As after a call: the address that the entry would return to is at 8 modulo 16.
  void** top = (void**)(((uintptr_t)stack + size) / 16 * 16) - 2;
  top[0] = (void*)entry;
  top[1] = nullptr;
  for (int i = 1; i <= 6; i++) top[-i] = nullptr;
  one->stack = top - 6;
}
}  // namespace host
#else
namespace host {
typedef ucontext_t fiber;
inline void swap(fiber* from, fiber* to) { swapcontext(from, to); }
inline void prepare(fiber* one, char* stack, size_t size, void (*entry)()) {
  getcontext(one);
  one->uc_stack.ss_sp = stack;
  one->uc_stack.ss_size = size;
  one->uc_link = nullptr;
  makecontext(one, entry, 0);
}
}  // namespace host
#endif

// ---- lanes ----

namespace host {

struct place { const char* file; int line; };
enum class wait { none, barrier, simd, ended };

struct lane {
  fiber at;
  uint index;
  wait state;
  int operation;        // of the collective it waits in
  place where;
  uint turns;           // collectives passed: two boxes in turn, since a lane is never two ahead
  uint64_t box[2];
};

static lane lanes[1024];
static uint count;
static uint group_of_grid[3];
static uint arrived_in_simd[32];
static struct { bool known; uint64_t bits; } folds[32][2];  // of a SIMD group and turn, by the first lane that reads
static uint arrived_at_barrier;
static lane* now;
static fiber scheduler;
static bool failed;
static char* message;
static size_t message_size;
static uint64_t seed;

template <typename... A> [[gnu::noinline, gnu::cold]] void report(const char* format, A... values) {
  snprintf(message, message_size, format, values...);
}

// Ends the run from within a lane, whose stack is abandoned.
template <typename... A> [[noreturn, gnu::noinline, gnu::cold]] void fault(const char* format, A... values) {
  int used = snprintf(message, message_size, format, values...);
  if (used > 0 && size_t(used) < message_size)
    snprintf(message + used, message_size - used, " (lane %u of threadgroup %u, %u, %u)", now->index, group_of_grid[0],
             group_of_grid[1], group_of_grid[2]);
  failed = true;
  swap(&now->at, &scheduler);
  __builtin_unreachable();
}

static void pause(lane* self) {
  swap(&self->at, &scheduler);
}

[[gnu::noinline]] static void stop_at_barrier(place where) {
  now->state = wait::barrier;
  now->where = where;
  arrived_at_barrier++;
  pause(now);
  asm volatile("" ::: "memory");
}

// Leaves `bits` for the SIMD group; returns once all 32 lanes have left theirs.
[[gnu::noinline]] static uint meet(int operation, uint64_t bits, place where) {
  lane* self = now;
  uint turn = self->turns++ & 1;
  uint group = self->index / 32;
  lane* first = lanes + 32 * group;
  self->box[turn] = bits;
  self->operation = operation;
  self->where = where;
  self->state = wait::simd;
  if (++arrived_in_simd[group] == 32) {
    arrived_in_simd[group] = 0;
    folds[group][turn].known = false;
    for (uint i = 0; i < 32; i++) {
      if (first[i].operation != operation || first[i].where.line != where.line)
        fault("divergence: lanes of a SIMD group meet in different operations, at %s:%d and at %s:%d", first[i].where.file,
              first[i].where.line, where.file, where.line);
      first[i].state = wait::none;
    }
  }
  pause(self);
  asm volatile("" ::: "memory");
  return turn;
}

static uint64_t draw() {
  seed ^= seed << 13;
  seed ^= seed >> 7;
  seed ^= seed << 17;
  return seed >> 20;
}

static void arrange(uint* order, uint n, int chosen) {
  for (uint i = 0; i < n; i++) order[i] = chosen == 1 ? n - 1 - i : i;
  if (chosen < 2) return;
  for (uint i = n; i > 1; i--) {
    uint j = draw() % i, kept = order[i - 1];
    order[i - 1] = order[j];
    order[j] = kept;
  }
}

[[gnu::cold]] static void stuck() {
  lane *simd = nullptr, *barrier = nullptr, *ended = nullptr;
  for (uint i = 0; i < count; i++) {
    lane* one = lanes + i;
    (one->state == wait::simd ? simd : one->state == wait::barrier ? barrier : ended) = one;
  }
  lane* waiting = simd ? simd : barrier;
  lane* other = nullptr;
  for (uint i = 0; i < count && !other; i++)
    if (lanes[i].state != waiting->state && (waiting->state == wait::barrier || i / 32 == waiting->index / 32))
      other = lanes + i;
  const char* what = waiting->state == wait::simd ? "simd operation" : "threadgroup_barrier";
  if (other && other->state != wait::ended)
    report("divergence: lane %u waits in the %s at %s:%d while lane %u waits at %s:%d", waiting->index, what,
           waiting->where.file, waiting->where.line, other->index, other->where.file, other->where.line);
  else
    report("divergence: lane %u waits in the %s at %s:%d while lane %u has ended", waiting->index, what,
           waiting->where.file, waiting->where.line, other ? other->index : 0u);
}

// Runs a lane until it waits or ends; false after a fault.
static bool resume(lane* one) {
  now = one;
  swap(&scheduler, &one->at);
  return !failed;
}

// Runs the lanes of one threadgroup to their ends; false after a fault.
static bool run_lanes(int chosen) {
  uint order[1024];
  for (uint i = 0; i < count; i++) lanes[i].state = wait::none;
  arrived_at_barrier = 0;
  for (uint g = 0; g < 32; g++) arrived_in_simd[g] = 0;
  arrange(order, count, chosen);
  for (;;) {
    bool moved = false;
    uint ended = 0;
    for (uint i = 0; i < count; i++) {
      lane* one = lanes + order[i];
      if (one->state == wait::none) {
        moved = true;
        if (!resume(one)) return false;
      }
      if (one->state == wait::ended) ended++;
    }
    if (ended == count) return true;
    if (arrived_at_barrier == count) {
      for (uint i = 1; i < count; i++)
        if (lanes[i].where.line != lanes[0].where.line) {
          report("divergence: lanes wait in different threadgroup barriers, lane 0 at %s:%d and lane %u at %s:%d",
                 lanes[0].where.file, lanes[0].where.line, i, lanes[i].where.file, lanes[i].where.line);
          return false;
        }
      for (uint i = 0; i < count; i++) lanes[i].state = wait::none;
      arrived_at_barrier = 0;
      arrange(order, count, chosen);
    } else if (!moved) {
      stuck();
      return false;
    }
  }
}

// ---- device arrays ----

struct range { const char* name; const char* base; long count; };

template <typename T> struct checked {
  T* at;
  const range* of;

  checked() = default;
  checked(T* at, const range* of) : at(at), of(of) {}
  operator checked<const T>() const { return {at, of}; }

  T& reach(long step) const {
    T* to = (T*)((uintptr_t)at + step * (long)sizeof(T));
    long index = ((long)(uintptr_t)to - (long)(uintptr_t)of->base) / (long)sizeof(T);
    if ((uintptr_t)to < (uintptr_t)of->base || index >= of->count)
      fault("out of bounds: index %ld of device array '%s', which has %ld elements", index, of->name, of->count);
    return *to;
  }
  template <typename I> T& operator[](I index) const { return reach((long)index); }
  T& operator*() const { return reach(0); }
  T* operator->() const { return &reach(0); }

  template <typename I> checked& operator+=(I n) { return *this = *this + n; }
  template <typename I> checked& operator-=(I n) { return *this = *this - n; }
  checked& operator++() { return *this += 1; }
  checked& operator--() { return *this -= 1; }
  checked operator++(int) { checked old = *this; *this += 1; return old; }
  checked operator--(int) { checked old = *this; *this -= 1; return old; }
  // For casts to a pointer to an atomic: the element pointed to is checked, what is reached from it is not.
  template <typename A> explicit operator A*() const { return (A*)&reach(0); }

  template <typename I> friend checked operator+(checked p, I n) { return {(T*)((uintptr_t)p.at + (long)n * (long)sizeof(T)), p.of}; }
  friend checked operator+(long n, checked p) { return p + n; }
  template <typename I> friend checked operator-(checked p, I n) { return p + -(long)n; }
  friend long operator-(checked a, checked b) { return ((long)(uintptr_t)a.at - (long)(uintptr_t)b.at) / (long)sizeof(T); }
  friend bool operator==(checked a, checked b) { return a.at == b.at; }
  friend bool operator!=(checked a, checked b) { return a.at != b.at; }
  friend bool operator<(checked a, checked b) { return a.at < b.at; }
  friend bool operator>(checked a, checked b) { return a.at > b.at; }
  friend bool operator<=(checked a, checked b) { return a.at <= b.at; }
  friend bool operator>=(checked a, checked b) { return a.at >= b.at; }
};

template <bool> struct when {};
template <> struct when<true> { typedef int type; };
template <typename T> struct same { typedef T type; };

}  // namespace host

// What -fsanitize=bounds calls: arrays of the threadgroup and of the lane.
struct ubsan_type { uint16_t kind, info; char name[1]; };
struct ubsan_bounds { const char* file; uint32_t line, column; ubsan_type *array, *index; };
extern "C" void __ubsan_handle_out_of_bounds(ubsan_bounds* data, uintptr_t index) {
  host::fault("out of bounds: index %ld of array %s at %s:%u", (long)index, data->array->name, data->file, data->line);
}
extern "C" void __ubsan_handle_out_of_bounds_abort(ubsan_bounds* data, uintptr_t index) {
  __ubsan_handle_out_of_bounds(data, index);
}

template <typename To, typename From> inline To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  __builtin_memcpy(&to, &x, sizeof(To));
  return to;
}

// ---- half and bfloat ----

namespace host {

inline uint16_t half_of(float x) {
  uint32_t bits = as_type<uint32_t>(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return sign | 0x7e00u | (size >> 13 & 0x1ffu);
  if (size >= 0x47800000u) return sign | 0x7c00u;  // 65536 and more
  if (size < 0x38800000u) {                        // below the normal halves: multiples of 2^-24
    if (size < 0x33000000u) return sign;
    uint32_t shift = 126u - (size >> 23), whole = (size & 0x7fffffu) | 0x800000u;
    uint32_t kept = whole >> shift, rest = whole & ((1u << shift) - 1u), middle = 1u << (shift - 1u);
    return sign | (kept + (rest > middle || (rest == middle && (kept & 1u))));
  }
  uint32_t kept = (size - 0x38000000u) >> 13, rest = size & 0x1fffu;
  return sign | (kept + (rest > 0x1000u || (rest == 0x1000u && (kept & 1u))));
}

inline float float_of_half(uint16_t bits) {
  uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 0x3ffu;
  if (exponent == 31u) return as_type<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent) return as_type<float>(sign | (exponent + 112u) << 23 | fraction << 13);
  float size = float(fraction) * 0x1p-24f;
  return sign ? -size : size;
}

inline uint16_t bfloat_of(float x) {
  uint32_t bits = as_type<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

}  // namespace host

struct half {
  uint16_t bits;
  half() = default;
  half(float x) : bits(host::half_of(x)) {}
  operator float() const { return host::float_of_half(bits); }
};

struct bfloat {
  uint16_t bits;
  bfloat() = default;
  bfloat(float x) : bits(host::bfloat_of(x)) {}
  operator float() const { return as_type<float>(uint32_t(bits) << 16); }
};

typedef half float16_t;
typedef bfloat bfloat16_t;

namespace host {

template <typename T> struct small { static constexpr bool is = false; };
template <> struct small<half> { static constexpr bool is = true; };
template <> struct small<bfloat> { static constexpr bool is = true; };
template <typename T> struct number { static constexpr bool is = small<T>::is; };
#define VELOXFN_NUMBER(T) template <> struct number<T> { static constexpr bool is = true; };
VELOXFN_NUMBER(float) VELOXFN_NUMBER(bool) VELOXFN_NUMBER(char) VELOXFN_NUMBER(signed char) VELOXFN_NUMBER(uchar)
VELOXFN_NUMBER(short) VELOXFN_NUMBER(ushort) VELOXFN_NUMBER(int) VELOXFN_NUMBER(uint) VELOXFN_NUMBER(long)
VELOXFN_NUMBER(ulong) VELOXFN_NUMBER(long long) VELOXFN_NUMBER(unsigned long long)
#undef VELOXFN_NUMBER

// half with half and with integers gives half, with float it gives float.
template <typename A, typename B, bool = (small<A>::is || small<B>::is) && number<A>::is && number<B>::is> struct joined {};
template <typename T> struct joined<T, T, true> { typedef T type; };
template <typename B> struct joined<half, B, true> { typedef half type; };
template <typename A> struct joined<A, half, true> { typedef half type; };
template <typename B> struct joined<bfloat, B, true> { typedef bfloat type; };
template <typename A> struct joined<A, bfloat, true> { typedef bfloat type; };
template <> struct joined<half, half, true> { typedef half type; };
template <> struct joined<bfloat, bfloat, true> { typedef bfloat type; };
template <> struct joined<half, float, true> { typedef float type; };
template <> struct joined<float, half, true> { typedef float type; };
template <> struct joined<bfloat, float, true> { typedef float type; };
template <> struct joined<float, bfloat, true> { typedef float type; };
template <> struct joined<bfloat, half, true> {};
template <> struct joined<half, bfloat, true> {};

}  // namespace host

#define VELOXFN_OPERATOR(op)                                                                          \
  template <typename A, typename B> inline typename host::joined<A, B>::type operator op(A a, B b) {  \
    return float(a) op float(b);                                                                      \
  }                                                                                                   \
  template <typename B> inline half& operator op##=(half& a, B b) { return a = half(float(a op b)); } \
  template <typename B> inline bfloat& operator op##=(bfloat& a, B b) { return a = bfloat(float(a op b)); }
VELOXFN_OPERATOR(+) VELOXFN_OPERATOR(-) VELOXFN_OPERATOR(*) VELOXFN_OPERATOR(/)
#undef VELOXFN_OPERATOR
inline half operator-(half x) { half y; y.bits = x.bits ^ 0x8000u; return y; }
inline bfloat operator-(bfloat x) { bfloat y; y.bits = x.bits ^ 0x8000u; return y; }

// ---- functions ----

namespace metal {

#define VELOXFN_MATH(name)                                                                             \
  inline float name(float x) { return __builtin_##name##f(x); }                                        \
  template <typename T, typename host::when<host::small<T>::is>::type = 0> inline T name(T x) {         \
    return T(__builtin_##name##f(float(x)));                                                           \
  }
VELOXFN_MATH(exp) VELOXFN_MATH(exp2) VELOXFN_MATH(log) VELOXFN_MATH(log2) VELOXFN_MATH(log10) VELOXFN_MATH(sqrt)
VELOXFN_MATH(sin) VELOXFN_MATH(cos) VELOXFN_MATH(tan) VELOXFN_MATH(tanh) VELOXFN_MATH(floor) VELOXFN_MATH(ceil)
VELOXFN_MATH(trunc) VELOXFN_MATH(round) VELOXFN_MATH(rint) VELOXFN_MATH(fabs)
#undef VELOXFN_MATH

inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float pow(float x, float y) { return __builtin_powf(x, y); }
inline float fmod(float x, float y) { return __builtin_fmodf(x, y); }
inline float copysign(float x, float y) { return __builtin_copysignf(x, y); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return half(__builtin_fmaf(a, b, c)); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline float abs(float x) { return __builtin_fabsf(x); }
inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }
template <typename T, typename host::when<host::small<T>::is>::type = 0> inline T abs(T x) { return fabs(x); }
inline float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : isnan(x) ? 0.0f : x; }

// Of a NaN and a number, the number.
template <typename T> inline T min(T a, T b) { return b < a || a != a ? b : a; }
template <typename T> inline T max(T a, T b) { return b > a || a != a ? b : a; }
inline float fmin(float a, float b) { return min(a, b); }
inline float fmax(float a, float b) { return max(a, b); }
template <typename T> inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <typename T> inline T select(T a, T b, bool c) { return c ? b : a; }
inline uint popcount(uint x) { return __builtin_popcount(x); }
inline uint clz(uint x) { return x ? __builtin_clz(x) : 32u; }
inline uint ctz(uint x) { return x ? __builtin_ctz(x) : 32u; }
inline uint mulhi(uint a, uint b) { return uint(ulong(a) * b >> 32); }

namespace precise { using namespace metal; }
namespace fast { using namespace metal; }

// ---- barriers and simd operations ----

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

#define VELOXFN_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void threadgroup_barrier(mem_flags, VELOXFN_PLACE) { host::stop_at_barrier({file, line}); }
inline void simdgroup_barrier(mem_flags, VELOXFN_PLACE) { host::meet(0, 0, {file, line}); }

}  // namespace metal

namespace host {

template <typename T> struct gathered {
  lane* first;
  uint turn, own;
  gathered(int operation, T x, place where) {
    static_assert(sizeof(T) <= 8, "simd operations take scalars");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &x, sizeof(T));
    lane* self = now;
    first = lanes + self->index / 32 * 32;
    own = self->index % 32;
    turn = meet(operation, bits, where);
  }
  T operator[](uint i) const {
    if (i >= 32) fault("simd operation reads lane %u of 32", i);
    T x;
    __builtin_memcpy(&x, &first[i].box[turn], sizeof(T));
    return x;
  }
  // In the order of a butterfly, which is the same in every lane.
  template <typename F> T folded(F join) const {
    auto& fold = folds[(first - lanes) / 32][turn];
    T x[32];
    if (!fold.known) {
      for (uint i = 0; i < 32; i++) __builtin_memcpy(x + i, &first[i].box[turn], sizeof(T));
      for (uint m = 16; m > 0; m /= 2)
        for (uint i = 0; i < m; i++) x[i] = join(x[i], x[i + m]);
      fold.known = true;
      __builtin_memcpy(&fold.bits, x, sizeof(T));
    }
    __builtin_memcpy(x, &fold.bits, sizeof(T));
    return x[0];
  }
};

}  // namespace host

namespace metal {

template <typename T> inline T simd_sum(T x, VELOXFN_PLACE) {
  return host::gathered<T>(1, x, {file, line}).folded([](T a, T b) { return T(a + b); });
}
template <typename T> inline T simd_product(T x, VELOXFN_PLACE) {
  return host::gathered<T>(2, x, {file, line}).folded([](T a, T b) { return T(a * b); });
}
template <typename T> inline T simd_max(T x, VELOXFN_PLACE) {
  return host::gathered<T>(3, x, {file, line}).folded([](T a, T b) { return max(a, b); });
}
template <typename T> inline T simd_min(T x, VELOXFN_PLACE) {
  return host::gathered<T>(4, x, {file, line}).folded([](T a, T b) { return min(a, b); });
}
inline bool simd_all(bool x, VELOXFN_PLACE) {
  return host::gathered<bool>(5, x, {file, line}).folded([](bool a, bool b) { return a && b; });
}
inline bool simd_any(bool x, VELOXFN_PLACE) {
  return host::gathered<bool>(6, x, {file, line}).folded([](bool a, bool b) { return a || b; });
}
template <typename T> inline T simd_shuffle(T x, ushort other, VELOXFN_PLACE) {
  return host::gathered<T>(7, x, {file, line})[other];
}
template <typename T> inline T simd_broadcast(T x, ushort other, VELOXFN_PLACE) {
  return host::gathered<T>(8, x, {file, line})[other];
}
template <typename T> inline T simd_broadcast_first(T x, VELOXFN_PLACE) {
  return host::gathered<T>(9, x, {file, line})[0];
}
template <typename T> inline T simd_shuffle_xor(T x, ushort mask, VELOXFN_PLACE) {
  host::gathered<T> all(10, x, {file, line});
  return all[all.own ^ mask];
}
template <typename T> inline T simd_shuffle_down(T x, ushort by, VELOXFN_PLACE) {
  host::gathered<T> all(11, x, {file, line});
  return all[all.own + by < 32 ? all.own + by : all.own];
}
template <typename T> inline T simd_shuffle_up(T x, ushort by, VELOXFN_PLACE) {
  host::gathered<T> all(12, x, {file, line});
  return all[all.own >= by ? all.own - by : all.own];
}
template <typename T> inline T simd_prefix_inclusive_sum(T x, VELOXFN_PLACE) {
  host::gathered<T> all(13, x, {file, line});
  T sum = all[0];
  for (uint i = 1; i <= all.own; i++) sum = T(sum + all[i]);
  return sum;
}
template <typename T> inline T simd_prefix_exclusive_sum(T x, VELOXFN_PLACE) {
  host::gathered<T> all(14, x, {file, line});
  T sum = T(0);
  for (uint i = 0; i < all.own; i++) sum = T(sum + all[i]);
  return sum;
}
#undef VELOXFN_PLACE

// ---- atomics: a lane is never interrupted ----

enum memory_order { memory_order_relaxed };
template <typename T> struct atomic { T value; };
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;
typedef atomic<float> atomic_float;

#define VELOXFN_ATOMIC(name, new_value)                                                                             \
  template <typename T>                                                                                             \
  inline T atomic_##name##_explicit(atomic<T>* at, typename host::same<T>::type x, memory_order) {                  \
    T old = at->value;                                                                                              \
    at->value = new_value;                                                                                          \
    return old;                                                                                                     \
  }
VELOXFN_ATOMIC(exchange, x) VELOXFN_ATOMIC(fetch_add, T(old + x)) VELOXFN_ATOMIC(fetch_sub, T(old - x))
VELOXFN_ATOMIC(fetch_min, min(old, x)) VELOXFN_ATOMIC(fetch_max, max(old, x))
VELOXFN_ATOMIC(fetch_or, old | x) VELOXFN_ATOMIC(fetch_and, old & x)
#undef VELOXFN_ATOMIC
template <typename T> inline T atomic_load_explicit(const atomic<T>* at, memory_order) { return at->value; }
template <typename T> inline void atomic_store_explicit(atomic<T>* at, typename host::same<T>::type x, memory_order) {
  at->value = x;
}
template <typename T>
inline bool atomic_compare_exchange_weak_explicit(atomic<T>* at, T* expected, typename host::same<T>::type x, memory_order,
                                                  memory_order) {
  bool equal = __builtin_memcmp(&at->value, expected, sizeof(T)) == 0;
  if (equal) at->value = x; else *expected = at->value;
  return equal;
}

}  // namespace metal

using namespace metal;

// A product that is rounded by itself: the compiler is told to fuse nothing.
inline float product(float a, float b) { return a * b; }

namespace host {
// What CUDA reads by one load begins at a multiple of its size, up to 16 bytes.
template <int n, typename T> inline void aligned(checked<T> from, const char* by) {
  constexpr long bytes = n * sizeof(T) < 16 ? n * sizeof(T) : 16;
  const long offset = (long)(uintptr_t)from.at - (long)(uintptr_t)from.of->base;
  if (offset % bytes)
    fault("misaligned: %s<%d> from index %ld of device array '%s'", by, n, offset / (long)sizeof(T), from.of->name);
}
template <int n, typename T> inline void aligned(T*, const char*) {}
}  // namespace host

// n elements, in registers as they came.
template <typename T, int n> struct Packed { T at[n]; };

// Elements at .. at + n - 1 of a row of `dims`, 0 behind its end. n is a power of two, n elements are 16 bytes at most, and
// `at` is a multiple of n.
template <typename T, int n, int dims, typename P> inline Packed<T, n> load_packed(P row, uint at) {
  static_assert((n & (n - 1)) == 0 && n * sizeof(T) <= 16, "load_packed takes a power of two, 16 bytes at most");
  if (dims % n == 0 && at < uint(dims)) host::aligned<n>(row + at, "load_packed");
  Packed<T, n> x;
  for (int i = 0; i < n; i++) x.at[i] = at + i < uint(dims) ? T(row[at + i]) : T(0.0f);
  return x;
}

template <typename T, int n, int dims, typename P> inline void store_packed(P row, uint at, Packed<T, n> x) {
  if (dims % n == 0 && at < uint(dims)) host::aligned<n>(row + at, "store_packed");
  for (int i = 0; i < n; i++) {
    if (at + i < uint(dims)) row[at + i] = x.at[i];
  }
}

// n elements for long, from `from` and to `to`, aligned to them.
template <typename T, int n> using Held = Packed<T, n>;
template <typename T, int n, typename P> inline Held<T, n> load_held(P from) {
  return load_packed<T, n, n>(from, 0);
}
template <typename T, int n, typename P> inline void store_held(P to, Packed<T, n> x) {
  host::aligned<n>(to, "store_held");
  for (int i = 0; i < n; i++) to[i] = x.at[i];
}
template <typename T, int n> inline float element(Packed<T, n> x, int i) { return float(x.at[i]); }

// n consecutive elements at `from` as float in to[0 .. n - 1]; where n is a power of two, `from` is aligned to them.
template <int n, typename P, typename A> inline void load_floats(P from, A&& to) {
  if ((n & (n - 1)) == 0) host::aligned<n>(from, "load_floats");
  for (int i = 0; i < n; i++) to[i] = float(from[i]);
}

// ---- the run; the body follows, as `veloxfn_body` ----

static uint3 veloxfn_groups, veloxfn_threads;
static void** veloxfn_arrays;
static const host::range* veloxfn_ranges;
static void veloxfn_body(uint3 thread_position_in_threadgroup, uint3 threadgroup_position_in_grid,
                         uint3 threads_per_threadgroup, uint3 threadgroups_per_grid, uint thread_index_in_simdgroup,
                         uint simdgroup_index_in_threadgroup);

static void veloxfn_fiber() {
  host::lane* self = host::now;
  for (;;) {
    veloxfn_body({self->index, 0, 0}, {host::group_of_grid[0], host::group_of_grid[1], host::group_of_grid[2]},
                 veloxfn_threads, veloxfn_groups, self->index % 32, self->index / 32);
    self->state = host::wait::ended;
    host::pause(self);
  }
}

extern "C" __attribute__((visibility("default"))) long veloxfn_threadgroup_bytes() {
  return (uintptr_t)__stop_threadgroup_memory - (uintptr_t)__start_threadgroup_memory;
}

// Runs the grid once, its threadgroups in the order given. Returns 0, or 1 with the fault in `message`.
extern "C" __attribute__((visibility("default"))) int veloxfn_run(
    void** arrays, const host::range* ranges, const uint* groups, const uint* group_order, uint threads, int order,
    char* stacks, size_t stack_size, char* message, size_t message_size) {
  host::message = message;
  host::message_size = message_size;
  host::failed = false;
  host::count = threads;
  host::seed = 0x9e3779b97f4a7c15u * (uint64_t(order) + 1);
  veloxfn_arrays = arrays;
  veloxfn_ranges = ranges;
  veloxfn_groups = {groups[0], groups[1], groups[2]};
  veloxfn_threads = {threads, 1, 1};
  for (uint i = 0; i < threads; i++) {
    host::lane* one = host::lanes + i;
    one->index = i;
    one->turns = 0;
    host::prepare(&one->at, stacks + i * stack_size, stack_size, veloxfn_fiber);
  }
  uint total = groups[0] * groups[1] * groups[2];
  for (uint i = 0; i < total; i++) {
    uint group = group_order[i];
    host::group_of_grid[0] = group % groups[0];
    host::group_of_grid[1] = group / groups[0] % groups[1];
    host::group_of_grid[2] = group / groups[0] / groups[1];
    // Threadgroup memory begins as NaN, or as an integer that differs between the orders.
    uint16_t poison = 0x7fc0u + (order & 31u);
    for (char* at = __start_threadgroup_memory; at + 1 < __stop_threadgroup_memory; at += 2)
      __builtin_memcpy(at, &poison, 2);
    if (!host::run_lanes(order)) return 1;
  }
  return 0;
}

// What bodies may not name, and what they may.
#pragma GCC poison double
#define device
#define constant const
#define thread
#define threadgroup static __attribute__((section("threadgroup_memory"), used))
