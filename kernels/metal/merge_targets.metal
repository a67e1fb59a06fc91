// The token that an eviction takes from a row, the survivors that take its content, and their weights: a threadgroup per
// row.
//
//   NEAREST: the survivor with the most similar key, no sink, the oldest of equals; its mass gains the loser's
//   else:    the TARGETS slots that come first after the loser in time; those that do not come after have no weight
//   weight = 1 / targets, or share / (1 - share) / targets where SIMILAR, share = cosine of the keys in [0, 1]
//
// Template: T, TK (types of values and keys), D, DV, TARGETS, SINK (int), NEAREST, SIMILAR, GATED, WHOLE (bool).

const uint row = threadgroup_position_in_grid.x;
const uint lane = thread_position_in_threadgroup.x;
const uint lanes = threads_per_threadgroup.x;
const uint me = thread_index_in_simdgroup;
const uint group = simdgroup_index_in_threadgroup;
const uint groups = lanes / 32;
const uint length = positions_shape[1];
const uint start = row * length;
threadgroup uint ranks[96];
threadgroup float sums[32];

// The loser.
Rank gone = last_rank();
for (uint j = lane; j < length; j += lanes) {
  if (positions[start + j] >= 0 && left[start + j] < 0) gone = Rank{0u, 0u, j};
}
gone = lowest(gone, ranks, lane, lanes);
const bool loses = gone.slot < length;
const uint from = loses ? gone.slot : 0u;
const int born = loses ? positions[start + from] : -1;
const float heavy = mass[start + from];
const ulong lost_key = ulong(start + from) * D;
float odd = 0.0f;
for (uint d = lane; d < uint(DV); d += lanes) {
  if (!finite(float(values[ulong(start + from) * DV + d]))) odd = 1.0f;
}
if (WHOLE) {
  for (uint d = lane; d < uint(D); d += lanes) {
    if (!finite(float(keys[lost_key + d]))) odd = 1.0f;
  }
}
const bool whole = sum_of(odd, sums, lane, lanes) == 0.0f && finite(heavy);
const float norm = NEAREST || SIMILAR ? norm_of(keys, lost_key, D, me) : 0.0f;

// Its targets: how many, and the sum of their masses.
float many = 0.0f;
float total = 0.0f;
uint target = 0xFFFFFFFFu;
if (NEAREST) {
  Rank nearest = last_rank();
  for (uint j = group; j < length; j += groups) {
    const int position = left[start + j];
    if (!loses || position < SINK) continue;
    const float cosine = cosine_of(keys, lost_key, ulong(start + j) * D, D, me, norm);
    const Rank other = Rank{0xFFFFFFFFu - ordinal(cosine), uint(position), j};
    if (finite(cosine) && below(other, nearest)) nearest = other;
  }
  nearest = lowest(nearest, ranks, lane, lanes);
  if (nearest.slot < length) {
    target = nearest.slot;
    const float mass_there = mass[start + target];
    many = 1.0f;
    total = finite(mass_there) ? mass_there : 0.0f;
  }
  if (lane == 0) into[row] = int(target < length ? target : 0u);
} else {
  // The turn of the slot that is chosen last, by bisection.
  uint low = 0u;
  uint high = 0x7FFFFFFFu + length;
  while (low < high) {
    const uint middle = low + (high - low) / 2;
    float below_it = 0.0f;
    for (uint j = lane; j < length; j += lanes) {
      if (turn_of(left[start + j], born, j, gone.slot) <= middle) below_it = below_it + 1.0f;
    }
    if (sum_of(below_it, sums, lane, lanes) >= float(TARGETS)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  uint mine = 0u;
  for (uint j = lane; j < length; j += lanes) {
    const int position = left[start + j];
    if (turn_of(position, born, j, gone.slot) <= low) {
      mine++;
      if (position > born) {
        const float mass_there = mass[start + j];
        many = many + 1.0f;
        if (finite(mass_there)) total = total + mass_there;
      }
    }
  }
  many = sum_of(many, sums, lane, lanes);
  total = sum_of(total, sums, lane, lanes);
  // Where this lane writes its own: behind those of the lanes before it.
  uint before = 0u;
  uint ours = 0u;
  for (uint i = 0; i < 32; i++) {
    const uint theirs = simd_shuffle(mine, i);
    if (i < me) before += theirs;
    ours += theirs;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (me == 0) ranks[group] = ours;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint g = 0; g < group; g++) before += ranks[g];
  for (uint j = lane; j < length; j += lanes) {
    const bool chosen = turn_of(left[start + j], born, j, gone.slot) <= low;
    if (chosen && before < uint(TARGETS)) into[row * TARGETS + before++] = int(j);
  }
}
threadgroup_barrier(mem_flags::mem_device);

// The gate, then a weight for each target.
bool merged = loses && whole;
if (GATED) {
  const float mean = total / max(many, 1.0f);
  float chance = heavy / mean;
  chance = isnan(chance) ? 0.0f : min(max(chance, 0.0f), 1.0f);
  if (mean == 0.0f) chance = heavy > 0.0f ? 1.0f : 0.0f;
  const ulong name = named(name_of(seed), streams[row]);
  merged = merged && hashed_uniform(uint(name), uint(name >> 32), born) < chance;
}
for (uint k = group; k < uint(TARGETS); k += groups) {
  const uint slot = uint(into[row * TARGETS + k]);
  const bool takes = merged && (NEAREST ? target < length : left[start + slot] > born);
  float weight = takes ? 1.0f / max(many, 1.0f) : 0.0f;
  if (SIMILAR) {
    const float cosine = cosine_of(keys, lost_key, ulong(start + slot) * D, D, me, norm);
    const float share = isnan(cosine) ? 0.0f : min(max(cosine, 0.0f), 1.0f);
    weight = product(weight, share / max(1.0f - share, 9.5367431640625e-7f));  // 2**-20, as in the reference
  }
  if (me == 0) weights[row * TARGETS + k] = weight;
}
if (NEAREST) {
  for (uint j = lane; j < length; j += lanes) {
    const float mass_there = mass[start + j];
    mass_out[start + j] = merged && j == target ? mass_there + heavy : mass_there;
  }
}
if (lane == 0) lost[row] = int(from);
