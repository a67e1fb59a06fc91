// One lane per pair of dimensions of a vector, turned by the difference of two angles, or per two that stay.
// Template: T (type), D, DIMS (int), TRADITIONAL (bool). scale has one element.

constexpr uint HALF = DIMS / 2;
constexpr uint ITEMS = HALF + (D - DIMS + 1) / 2;

const ulong i = ulong(threadgroup_position_in_grid.x) * threads_per_threadgroup.x + thread_position_in_threadgroup.x;
const ulong which = i / ITEMS;
const uint item = uint(i % ITEMS);
if (which < ulong(start_shape[0])) {
  auto vector = vectors + which * D;
  auto turned = out + which * D;
  if (item >= HALF) {
    const uint e = DIMS + 2 * (item - HALF);
    turned[e] = vector[e];
    if (e + 1 < D) turned[e + 1] = vector[e + 1];
  } else {
    const uint first = TRADITIONAL ? 2 * item : item, second = TRADITIONAL ? first + 1 : item + HALF;
    if (start[which] == to[which]) {
      turned[first] = vector[first];
      turned[second] = vector[second];
    } else {
      const float later = product(product(float(to[which]), scale[0]), inverse[item]);
      const float earlier = product(product(float(start[which]), scale[0]), inverse[item]);
      const float angle = later - earlier;
      const float back = angle - later;
      const float rest = (later - (angle - back)) - (earlier + back);  // what the difference lost to rounding
      const float plain_sine = sin(angle), plain_cosine = cos(angle);
      const float sine = plain_sine + product(rest, plain_cosine);
      const float cosine = plain_cosine - product(rest, plain_sine);
      const float x = float(vector[first]), y = float(vector[second]);
      turned[first] = T(product(x, cosine) - product(y, sine));
      turned[second] = T(product(y, cosine) + product(x, sine));
    }
  }
}
