// A threadgroup per query: maximum of its logits over the visible slots, and weight / sum of exp(logit - maximum).
//
// products [N, G, T, n] are q . k; logit = scale * product, or (scale * product + noise) / tau.
// Template: TEMPERED, NOISY (bool).

const uint query = threadgroup_position_in_grid.x;
const uint lane = thread_position_in_threadgroup.x;
const uint lanes = threads_per_threadgroup.x;
const uint groups = products_shape[1];
const uint count = products_shape[2];
const uint seen = products_shape[3];
const uint length = positions_shape[1];
const uint row = query / (groups * count);
const uint t = query % count;
const int limit = until[row * count + t];
threadgroup float shared[32];

float top = -INFINITY;
float total = 0.0f;
for (uint j = lane; j < seen; j += lanes) {
  const int position = positions[row * length + j];
  float x = products[ulong(query) * seen + j] * scale[0];
  if (position >= 0 && position <= limit && finite(x)) {
    if (NOISY) x += hashed_gumbel(names[2 * query], names[2 * query + 1], position);
    if (TEMPERED) x = x / tau[row * count + t];
    if (x > top) {
      total = total * exp(top - x) + 1.0f;
      top = x;
    } else {
      total += exp(x - top);
    }
  }
}
const float highest = max_of(top, shared, lane, lanes);
const float sum = sum_of(total > 0.0f ? total * exp(top - highest) : 0.0f, shared, lane, lanes);
if (lane == 0) {
  tops[query] = highest;
  scales[query] = sum > 0.0f ? weights[row * count + t] / sum : 0.0f;
}
