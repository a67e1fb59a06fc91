// One threadgroup per row: S tokens one after the other, each written, scored and followed by one eviction.
//
// A slot belongs to one lane, which keeps its position, mass, noise and logits to itself. Its logits are made by the
// lane's SIMD group, which takes 16 slots in a turn: 4 passes of 4 slots with 8 lanes on each. So a step has two
// barriers: one for the softmax over all SIMD groups, one for the weakest slot.
//
// Where HELD turns take all slots, the keys stay in registers until the last token: each lane's parts of the slots whose
// logits it makes. Where HELD is 0 they are read anew for each token; then the key of the token itself is written between
// the two barriers, and its logit is made from the copy in threadgroup memory.
//
// Template: T, Q (types of keys and queries), D, DV, HEADS, WIDTH (elements of one load, a divisor of D),
// GROUPS (SIMD groups), SLOTS (of a lane), HELD (int), MASSIVE, DECAYS, AGED, OWN, TEMPERED, NAMED, NOISY, PADDED (bool).
// limits: budget, sink, recent, rows of the buffers that are given. rates: decay, what products of queries and keys are
// multiplied by.

constexpr uint LANES = 32 * GROUPS;
constexpr uint TOGETHER = HEADS < 4 ? HEADS : 4;          // heads whose products are made in one pass over the keys
constexpr uint VECTORS = (D / WIDTH + 7) / 8;             // of a key, for each of 8 lanes
constexpr bool HOLDS = TOGETHER * VECTORS * WIDTH <= 32;  // its part of the queries, in registers
constexpr bool HOLDS_KEYS = HELD > 0;                     // and of the keys
constexpr uint TURNS = VECTORS == 1 && HEADS == 1 && !HOLDS_KEYS ? 2 : 1;  // whose keys are loaded at once
constexpr uint PASSES = 4 * TURNS;
constexpr int UNROLLED = SLOTS <= 5 ? SLOTS : 1;  // else a lane's slots are in memory of its own
constexpr uint QUERY_PARTS = (HEADS * D + LANES - 1) / LANES;
constexpr uint KEY_PARTS = (D + LANES - 1) / LANES;
constexpr uint VALUE_PARTS = (DV + LANES - 1) / LANES;
constexpr uint NONE = 0xFFFFFFFFu;
const mem_flags everywhere = mem_flags(uint(mem_flags::mem_device) | uint(mem_flags::mem_threadgroup));

const uint row = threadgroup_position_in_grid.x;
const uint lane = thread_position_in_threadgroup.x;
const uint group = lane / 32, me = lane % 32;
const uint sub = me % 8, part = me / 8;
const uint own = sub * 4 + part;
const uint length = positions_shape[1], count = queries_shape[OWN ? 2 : 1], size = limits[3];
const int budget = limits[0], sink = limits[1], recent = limits[2];
const uint capacity = uint(budget) + 1;
const float decay = rates[0], scale = rates[1];

alignas(16) threadgroup float asked[2 * HEADS * D];  // queries of this token and of the next, scaled
alignas(16) threadgroup T coming[2 * D];  // their keys
threadgroup float tops[HEADS * GROUPS];
threadgroup float sums[HEADS * GROUPS];
threadgroup uint ranks[96];

auto kept_keys = keys_out + ulong(row) * capacity * D;
auto kept_values = values_out + ulong(row) * capacity * DV;
Held<T, WIDTH> held[HOLDS_KEYS ? HELD * 4 * VECTORS : 1];  // of slot (turn * 16 + pass * 4 + part) * GROUPS + group
if (HOLDS_KEYS) {
  auto from = keys + ulong(row) * size * D + sub * WIDTH;
#pragma unroll
  for (uint i = 0; i < HELD * 4 * VECTORS; i++) {
    const uint slot = (i / VECTORS * 4 + part) * GROUPS + group, ahead = i % VECTORS * 8;
    held[HOLDS_KEYS ? i : 0] = Held<T, WIDTH>{};
    if (slot < min(size, capacity) && sub + ahead < D / WIDTH) {
      held[HOLDS_KEYS ? i : 0] = load_held<T, WIDTH>(from + slot * D + ahead * WIDTH);
    }
  }
} else {
  for (uint i = lane; i < capacity * D; i += LANES) {
    kept_keys[i] = i < size * D ? T(keys[ulong(row) * size * D + i]) : T(0.0f);
  }
}
for (uint i = lane; i < capacity * DV; i += LANES) {
  kept_values[i] = i < size * DV ? T(values[ulong(row) * size * DV + i]) : T(0.0f);
}
threadgroup_barrier(everywhere);

int position_of[SLOTS];  // -1 = free, -2 = there is no such slot
float mass_of[SLOTS], noise_of[SLOTS], logit_of[SLOTS * HEADS];
Rank mine = last_rank();
#pragma unroll (UNROLLED)
for (uint b = 0; b < SLOTS; b++) {
  const uint slot = (b * 32 + own) * GROUPS + group;
  const bool exists = slot < length;
  position_of[b] = exists ? positions[row * length + slot] : -2;
  mass_of[b] = MASSIVE && exists ? mass[row * length + slot] : 0.0f;
  noise_of[b] = NOISY && exists ? noise[row * length + slot] : 0.0f;
  const Rank other = Rank{0u, 0u, slot};
  if (position_of[b] == -1 && below(other, mine)) mine = other;
}
uint given = lowest(mine, ranks, lane, LANES).slot;
int now = seen[row];
const uint filled = group < length ? (length - group + GROUPS - 1) / GROUPS : 0;  // slots of the SIMD group
const uint turns = (filled + 15) / 16;

// A token is read from the device two steps ahead, its value one, and put into threadgroup memory one step ahead.
Q soon_query[QUERY_PARTS];
T soon_key[KEY_PARTS], soon_value[VALUE_PARTS > 0 ? VALUE_PARTS : 1];
bool wanted = false;  // whether token t counts

for (int t = -2; t < int(count); t++) {
  const uint at = row * count + uint(max(t, 0)), next = row * count + uint(t + 1), later = next + 1;
  const bool counts = wanted && given < length;
  const uint buffer = uint(t + 1) % 2;  // of the next token
  const bool more = t + 1 >= 0 && t + 1 < int(count);
  wanted = more && (!PADDED || valid[next]);
  const float warmth = TEMPERED || NOISY ? tau[at] : 1.0f;

  Q later_query[QUERY_PARTS];
  T later_key[KEY_PARTS], value[VALUE_PARTS > 0 ? VALUE_PARTS : 1];
#pragma unroll
  for (uint i = 0; i < QUERY_PARTS; i++) {
    const uint e = lane + i * LANES;
    const uint query = (row * HEADS + e / D) * count + uint(t + 2);
    if (t + 2 < int(count) && e < HEADS * D) later_query[i] = queries[ulong(query) * D + e % D];
  }
#pragma unroll
  for (uint i = 0; i < KEY_PARTS; i++) {
    const uint e = lane + i * LANES;
    if (t + 2 < int(count) && e < D) later_key[i] = fresh_keys[ulong(later) * D + e];
  }
#pragma unroll
  for (uint i = 0; i < VALUE_PARTS; i++) {
    const uint e = lane + i * LANES;
    value[i] = soon_value[i];
    if (more && e < DV) soon_value[i] = T(fresh_values[ulong(next) * DV + e]);
  }

  if (counts) {
    auto query = asked + (buffer ^ 1) * HEADS * D;
    auto arriving = coming + (buffer ^ 1) * D;
#pragma unroll (UNROLLED)
    for (uint b = 0; b < SLOTS; b++) {
      if ((b * 32 + own) * GROUPS + group == given) {
        position_of[b] = now;
        mass_of[b] = 0.0f;
        if (NOISY) noise_of[b] = drawn[at];
      }
    }
    if (HOLDS_KEYS && given % GROUPS == group) {
#pragma unroll
      for (uint n = 0; n < VECTORS; n++) {
        if (sub + n * 8 >= D / WIDTH) continue;
        const Held<T, WIDTH> key = load_held<T, WIDTH>(arriving + (sub + n * 8) * WIDTH);
#pragma unroll
        for (uint i = 0; i < HELD * 4; i++) {
          if (i * 4 + part == given / GROUPS) held[HOLDS_KEYS ? i * VECTORS + n : 0] = key;
        }
      }
    }
    for (uint head = 0; head < HEADS; head += TOGETHER) {
      float part_of_query[HOLDS ? TOGETHER * VECTORS * WIDTH : 1];
      if (HOLDS) {
#pragma unroll
        for (uint i = 0; i < TOGETHER * VECTORS * WIDTH; i++) {
          const uint h = head + i / (VECTORS * WIDTH), v = sub + i / WIDTH % VECTORS * 8;
          if (h < HEADS && v < D / WIDTH) part_of_query[HOLDS ? i : 0] = query[h * D + v * WIDTH + i % WIDTH];
        }
      }
#pragma unroll (HOLDS_KEYS ? HELD : 1)
      for (uint turn = 0; turn < (HOLDS_KEYS ? HELD : turns); turn += TURNS) {
        uint offsets[PASSES];  // of this lane's part of a key
#pragma unroll
        for (uint u = 0; u < PASSES; u++) {
          const uint slot = (turn * 16 + u * 4 + part) * GROUPS + group;
          offsets[u] = min(slot, length - 1) * D + sub * WIDTH;
        }
        float x[(HOLDS && !HOLDS_KEYS ? VECTORS : 1) * PASSES * WIDTH];
        if (HOLDS && !HOLDS_KEYS) {
#pragma unroll
          for (uint i = 0; i < VECTORS * PASSES; i++) {
            if (sub + i / PASSES * 8 >= D / WIDTH) continue;
            load_floats<WIDTH>(kept_keys + offsets[i % PASSES] + i / PASSES * 8 * WIDTH, x + (HOLDS ? i : 0) * WIDTH);
          }
        }
        // So it may be where keys are held. Elsewhere never, but no compiler knows: it would put loads behind the
        // arithmetic of others, each to be waited for.
        simdgroup_barrier(mem_flags::mem_none);
        if (turn * 16 * GROUPS + group >= length) continue;
        float dots[TOGETHER * PASSES];
#pragma unroll
        for (uint i = 0; i < TOGETHER * PASSES; i++) dots[i] = 0.0f;
#pragma unroll (HOLDS || HOLDS_KEYS ? VECTORS : 1)
        for (uint n = 0; n < VECTORS; n++) {
          const uint v = sub + n * 8;
          if (v >= D / WIDTH) continue;
          if (HOLDS_KEYS) {
#pragma unroll
            for (uint i = 0; i < PASSES * WIDTH; i++) {
              const uint from = (turn * 4 + i / WIDTH) * VECTORS + n;
              x[i] = element(held[HOLDS_KEYS ? from : 0], i % WIDTH);
            }
          } else if (!HOLDS) {
#pragma unroll
            for (uint u = 0; u < PASSES; u++) load_floats<WIDTH>(kept_keys + offsets[u] + n * 8 * WIDTH, x + u * WIDTH);
          }
          const uint from = HOLDS && !HOLDS_KEYS ? n * PASSES * WIDTH : 0;
#pragma unroll
          for (uint h = 0; h < TOGETHER; h++) {
            if (head + h >= HEADS) continue;
#pragma unroll
            for (uint i = 0; i < WIDTH; i++) {
              const float q = HOLDS ? part_of_query[HOLDS ? (h * VECTORS + n) * WIDTH + i : 0]
                                    : float(query[(head + h) * D + v * WIDTH + i]);
#pragma unroll
              for (uint u = 0; u < PASSES; u++) {
                dots[h * PASSES + u] = fma(q, x[from + u * WIDTH + i], dots[h * PASSES + u]);
              }
            }
          }
        }
#pragma unroll
        for (uint h = 0; h < TOGETHER; h++) {
          if (head + h >= HEADS) continue;
#pragma unroll
          for (uint w = 0; w < TURNS; w++) {
            // The sums of 4 passes over 8 lanes each; pass u ends in the lanes with sub % 4 == u.
            const uint d = h * PASSES + w * 4;
            const bool odd = sub & 1, high = sub & 2;
            float low_pair = odd ? dots[d + 1] : dots[d];
            float high_pair = odd ? dots[d + 3] : dots[d + 2];
            low_pair = low_pair + simd_shuffle_xor(odd ? dots[d] : dots[d + 1], 1);
            high_pair = high_pair + simd_shuffle_xor(odd ? dots[d + 2] : dots[d + 3], 1);
            float dot = (high ? high_pair : low_pair) + simd_shuffle_xor(high ? low_pair : high_pair, 2);
            dot = dot + simd_shuffle_xor(dot, 4);
            if (SLOTS <= 5) {
#pragma unroll
              for (uint b = 0; b < SLOTS; b++) {
                if (b * 2 + sub / 4 == turn + w) logit_of[b * HEADS + head + h] = dot;
              }
            } else if (sub / 4 == (turn + w) % 2) {
              logit_of[(turn + w) / 2 * HEADS + head + h] = dot;
            }
          }
        }
      }
      if (!HOLDS_KEYS && given % GROUPS == group) {  // the token's own, in the order of the sums above
#pragma unroll
        for (uint h = 0; h < TOGETHER; h++) {
          if (head + h >= HEADS) continue;
          float dot = 0.0f;
          for (uint v = sub; v < D / WIDTH; v += 8) {
#pragma unroll
            for (uint i = 0; i < WIDTH; i++) {
              dot = fma(query[(head + h) * D + v * WIDTH + i], float(arriving[v * WIDTH + i]), dot);
            }
          }
          dot = dot + simd_shuffle_xor(dot, 1);
          dot = dot + simd_shuffle_xor(dot, 2);
          dot = dot + simd_shuffle_xor(dot, 4);
#pragma unroll (UNROLLED)
          for (uint b = 0; b < SLOTS; b++) {
            if ((b * 32 + own) * GROUPS + group == given) logit_of[b * HEADS + head + h] = dot;
          }
        }
      }
    }
#pragma unroll
    for (uint h = 0; h < HEADS; h++) {
      float top = -INFINITY;
#pragma unroll (UNROLLED)
      for (uint b = 0; b < SLOTS; b++) {
        const uint slot = (b * 32 + own) * GROUPS + group;
        const bool visible = position_of[b] >= 0 && (OWN || slot != given || now == 0);
        float logit = visible ? logit_of[b * HEADS + h] : -INFINITY;
        if (NAMED && visible) {
          const ulong name = 2 * (ulong(row * HEADS + h) * count + uint(t));
          logit = logit + hashed_gumbel(names[name], names[name + 1], position_of[b]) / warmth;
        }
        logit = finite(logit) ? logit : -INFINITY;
        logit_of[b * HEADS + h] = logit;
        top = max(top, logit);
      }
      top = simd_max(top);
      float sum = 0.0f;
#pragma unroll (UNROLLED)
      for (uint b = 0; b < SLOTS; b++) {
        const float logit = logit_of[b * HEADS + h];
        sum = sum + (logit > -INFINITY ? exp(logit - top) : 0.0f);
      }
      sum = simd_sum(sum);
      if (me == 0) {
        tops[h * GROUPS + group] = top;
        sums[h * GROUPS + group] = sum;
      }
    }
  }
  if (more) {
#pragma unroll
    for (uint i = 0; i < QUERY_PARTS; i++) {
      const uint e = lane + i * LANES;
      const float asking = float(soon_query[i]) * scale;
      if (e < HEADS * D) asked[buffer * HEADS * D + e] = TEMPERED ? asking / tau[next] : asking;
    }
#pragma unroll
    for (uint i = 0; i < KEY_PARTS; i++) {
      const uint e = lane + i * LANES;
      if (e < D) coming[buffer * D + e] = soon_key[i];
    }
  }
#pragma unroll
  for (uint i = 0; i < QUERY_PARTS; i++) soon_query[i] = later_query[i];
#pragma unroll
  for (uint i = 0; i < KEY_PARTS; i++) soon_key[i] = later_key[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (!counts) continue;

#pragma unroll
  for (uint i = 0; i < KEY_PARTS; i++) {
    const uint e = lane + i * LANES;
    if (!HOLDS_KEYS && e < D) kept_keys[given * D + e] = coming[(buffer ^ 1) * D + e];
  }
#pragma unroll
  for (uint i = 0; i < VALUE_PARTS; i++) {
    const uint e = lane + i * LANES;
    if (e < DV) kept_values[given * DV + e] = value[i];
  }
  float attention[SLOTS];
#pragma unroll (UNROLLED)
  for (uint b = 0; b < SLOTS; b++) attention[b] = 0.0f;
#pragma unroll
  for (uint h = 0; h < HEADS; h++) {
    const float top_of = me < GROUPS ? float(tops[h * GROUPS + me]) : -INFINITY;
    const float top = simd_max(top_of);
    const float total = simd_sum(top_of > -INFINITY ? sums[h * GROUPS + me] * exp(top_of - top) : 0.0f);
    const float share = total > 0.0f ? (1.0f / float(HEADS)) / total : 0.0f;
#pragma unroll (UNROLLED)
    for (uint b = 0; b < SLOTS; b++) {
      const float logit = logit_of[b * HEADS + h];
      if (logit > -INFINITY) attention[b] = attention[b] + product(exp(logit - top), share);
    }
  }
  mine = last_rank();
#pragma unroll (UNROLLED)
  for (uint b = 0; b < SLOTS; b++) {
    float heavy = MASSIVE ? mass_of[b] : 0.0f;
    if (DECAYS) heavy = product(heavy, decay);
    heavy = heavy + attention[b];
    mass_of[b] = heavy;
    float importance = heavy;
    if (AGED) importance = heavy / float(max(now + (OWN ? 1 : 0) - position_of[b], 1));
    if (NOISY) importance = importance + product(warmth, noise_of[b]);
    if (position_of[b] != -2) {
      const uint slot = (b * 32 + own) * GROUPS + group;
      const Rank other = rank_of(importance, position_of[b], now + 1, sink, recent, slot);
      if (below(other, mine)) mine = other;
    }
  }
  mine = simd_lowest(mine);
  if (me == 0) {
    ranks[group] = mine.high;
    ranks[32 + group] = mine.low;
    ranks[64 + group] = mine.slot;
  }
  threadgroup_barrier(everywhere);
  Rank best = last_rank();
  if (me < GROUPS) best = Rank{ranks[me], ranks[32 + me], ranks[64 + me]};
  best = simd_lowest(best);
  // The next token goes where one was lost, or to the first slot that is still free, which ranks below all others.
  const bool loses = best.high >= 0x40000000u;
#pragma unroll (UNROLLED)
  for (uint b = 0; b < SLOTS; b++) {
    if (loses && length == capacity && (b * 32 + own) * GROUPS + group == best.slot) position_of[b] = -1;
  }
  given = loses && length < capacity ? NONE : best.slot;
  now++;
}

#pragma unroll (UNROLLED)
for (uint b = 0; b < SLOTS; b++) {
  const uint slot = (b * 32 + own) * GROUPS + group;
  if (slot < length) {
    positions_out[row * length + slot] = position_of[b];
    if (MASSIVE) mass_out[row * length + slot] = mass_of[b];
    if (NOISY) noise_out[row * length + slot] = noise_of[b];
  }
}
if (HOLDS_KEYS) {
  auto to = kept_keys + sub * WIDTH;
#pragma unroll
  for (uint i = 0; i < HELD * 4 * VECTORS; i++) {
    const uint slot = (i / VECTORS * 4 + part) * GROUPS + group, ahead = i % VECTORS * 8;
    if (slot < capacity && sub + ahead < D / WIDTH) {
      store_held<T, WIDTH>(to + slot * D + ahead * WIDTH, held[HOLDS_KEYS ? i : 0]);
    }
  }
}
