"""The prompt that `veloxfn generate` answers when it is given none: longer than the command's default budget."""

__all__ = ["DEFAULT_PROMPT"]

DEFAULT_PROMPT = """\
Read this text and answer the question at its end.

The harbour of Eskmouth has had a light since 1783. The first light was an iron basket of burning coal, \
hoisted on a wooden pole by two fishermen who took turns to feed it. It smoked so badly that sailors said they \
smelled the harbour before they saw it, and on wet nights it went out altogether. After the brig Clementine \
struck the northern reef in the winter of 1801, the merchants of the town collected money for a tower of \
stone. A young builder, Margaret Hale, drew the plans. She had watched oak trees stand through storms and gave \
the tower a wide foot and a narrow waist, so that the waves would climb it and fall back instead of pushing it \
over. The work took four summers. Stones were cut on shore, numbered, and carried out at low tide, and each \
was cut to lock into its neighbours like the parts of a puzzle.

The lamp was lit in October 1805 with twelve wicks and a ring of polished copper mirrors. It burned whale oil, \
later rape oil, later paraffin, and it could be seen for fourteen miles. Three keepers lived in the tower. \
They slept in curved beds, kept a goat for its milk, and wrote down the weather four times a day in a green \
book. The longest storm in the book lasted nine days; the keepers lived on biscuit and rain water, and the \
goat ate one of the charts. In 1871 a lens from Paris replaced the mirrors. It floated on a bath of mercury \
and turned so easily that a child could move it with one finger. Its beam reached twenty miles.

Electricity came later, by a cable that a trawler cut twice in the first year. The last keeper, Thomas Reed, \
left the tower in 1984, when a computer took over the lamp. He gave the green books to the school of Eskmouth, \
and the children copied the weather of every day into a table. Today the tower is open on Sundays, and a sign \
at the door says that Thomas Reed left the tower in 1984.

Question: In which year did Thomas Reed leave the tower?"""
