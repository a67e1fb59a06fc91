// One threadgroup per row: the first free slot is given to the token that arrives, and its entries of two columns; where
// LOSES, the position of the weakest slot, as evict_step.metal ranks them, becomes -1. Where CARRIES, keys and values come
// as well, copied: several threadgroups search all of a row and write a part of it each.
// Template: FIRST_ENTRY, SECOND_ENTRY (int): what the arrival's entry is. 0: there is no such column; 1: given; 2: zero;
// 3: the norm of its key of DIMS dimensions; 4: a Gumbel draw addressed by (seed, stream, position). TURNED (bool): it comes
// rotated at the number of tokens that are there. LOSES, RANKED (by the first column, else all are alike), KEEP_LOW (bool),
// SINK, RECENT (int). TELLS (of the slot), CARRIES (bool), T (type), VALUE_DIMS, KEY_PACK, VALUE_PACK (elements of a load).
// A lane has SLOTS slots at a time, whose loads are under way together.

const uint row = threadgroup_position_in_grid.x;
const uint lane = thread_position_in_threadgroup.x;
const uint lanes = threads_per_threadgroup.x;
const uint length = positions_shape[1];
const uint each = CARRIES ? (length + threadgroups_per_grid.y - 1) / threadgroups_per_grid.y : length;
const uint from = CARRIES ? min(threadgroup_position_in_grid.y * each, length) : 0u;
const uint to = CARRIES ? min(from + each, length) : length;
const int now = seen[row];
threadgroup uint ranks[96];
threadgroup float sums[32];

int position[SLOTS];
Rank mine = last_rank();
float live = 0.0f;
for (uint begin = 0; begin < length; begin += SLOTS * lanes) {
  for (int i = 0; i < SLOTS; i++) position[i] = positions[row * length + min(begin + i * lanes + lane, length - 1)];
  for (int i = 0; i < SLOTS; i++) {
    const uint j = begin + i * lanes + lane;
    if (j < length) {
      if (position[i] >= 0) live = live + 1.0f;
      const Rank other = Rank{position[i] < 0 ? 0u : 1u, uint(position[i]), j};
      if (below(other, mine)) mine = other;
    }
  }
}
const uint given = lowest(mine, ranks, lane, lanes).slot;
const int there = TURNED ? int(sum_of(live, sums, lane, lanes)) : 0;
float norm = 0.0f;
float drawn = 0.0f;
if (FIRST_ENTRY == 3) {
  norm = norm_of(fresh_keys, row * DIMS, DIMS, lane % 32);
}
if (SECOND_ENTRY == 4) {
  const ulong name = named(name_of(seed), streams[row]);
  drawn = hashed_gumbel(uint(name), uint(name >> 32), now);
}
float first_entry = 0.0f;
if (FIRST_ENTRY == 1) first_entry = first_fresh[row];
if (FIRST_ENTRY == 3) first_entry = norm;
float second_entry = 0.0f;
if (SECOND_ENTRY == 1) second_entry = second_fresh[row];
if (SECOND_ENTRY == 4) second_entry = drawn;
const bool held = length <= SLOTS * lanes;  // the positions, in registers
mine = last_rank();
for (uint begin = 0; begin < length; begin += SLOTS * lanes) {
  float first_kept[SLOTS];
  float second_kept[SLOTS];
  int turned[SLOTS];
  for (int i = 0; i < SLOTS; i++) {
    const uint at = row * length + min(begin + i * lanes + lane, length - 1);
    if (!held) position[i] = positions[at];
    first_kept[i] = FIRST_ENTRY > 0 ? float(first[at]) : 0.0f;
    second_kept[i] = SECOND_ENTRY > 0 ? float(second[at]) : 0.0f;
    turned[i] = TURNED ? int(rotations[at]) : 0;
  }
  for (int i = 0; i < SLOTS; i++) {
    const uint j = begin + i * lanes + lane;
    const uint at = row * length + j;
    const bool here = j == given;
    if (j >= from && j < to) {
      positions_out[at] = here ? now : position[i];
      if (TURNED) rotations_out[at] = here ? there : turned[i];
      if (FIRST_ENTRY > 0) first_out[at] = here ? first_entry : first_kept[i];
      if (SECOND_ENTRY > 0) second_out[at] = here ? second_entry : second_kept[i];
    }
    if (LOSES && j < length) {
      const float importance = RANKED ? importance_of(here ? first_entry : first_kept[i], 0, KEEP_LOW, 0.0f) : 0.0f;
      const Rank other = rank_of(importance, here ? now : position[i], now + 1, SINK, RECENT, j);
      if (below(other, mine)) mine = other;
    }
  }
}
if (LOSES) {
  const uint lost = lowest(mine, ranks, lane, lanes).slot;
  // This lane has written it.
  if (lost >= from && lost < to && lane == lost % lanes) positions_out[row * length + lost] = -1;
}
if (lane == 0 && from == 0) {
  if (TELLS) slot[row] = int(given);
  seen_out[row] = now + 1;
}
if (CARRIES) {
  const ulong at = ulong(row) * length + from;
  const uint count = to - from;
  copy_packed<T, KEY_PACK>(old_keys + at * DIMS, keys_out + at * DIMS, count * DIMS, lane, lanes);
  copy_packed<T, VALUE_PACK>(old_values + at * VALUE_DIMS, values_out + at * VALUE_DIMS, count * VALUE_DIMS, lane, lanes);
  threadgroup_barrier(mem_flags::mem_device);
  const bool here = given >= from && given < to;
  const ulong place = ulong(row) * length + given;
  for (uint d = lane; d < DIMS && here; d += lanes) keys_out[place * DIMS + d] = fresh_keys[row * DIMS + d];
  for (uint d = lane; d < VALUE_DIMS && here; d += lanes) {
    values_out[place * VALUE_DIMS + d] = fresh_values[row * VALUE_DIMS + d];
  }
}
