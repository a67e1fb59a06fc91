"""The prompt that `veloxfn generate` answers when it is given none: longer than the command's default budget."""

__all__ = ["DEFAULT_PROMPT"]

DEFAULT_PROMPT = """\
Read this account, then answer the question at its end.

The harbour of Eskmouth has had a light since 1783. The first was an iron basket of burning coal, hoisted on a \
wooden pole by two fishermen who took turns to feed it. It smoked so badly that sailors said they smelled the \
harbour before they saw it, and on wet nights it went out altogether. After the brig Clementine struck the \
northern reef in the winter of 1801, the merchants of the town collected money for a tower of stone. A young \
builder, Margaret Hale, drew the plans. She had watched oak trees stand through storms and gave the tower a \
wide foot and a narrow waist, so that the waves would climb it and fall back instead of pushing it over. The \
work took four summers. Stones were cut on shore, numbered, and carried out at low tide, and each was cut to \
lock into its neighbours like the parts of a puzzle.

The lamp was lit in October 1805 with twelve wicks and a ring of polished copper mirrors. It burned whale oil, \
later rape oil, later paraffin, and it could be seen for fourteen miles. Three keepers lived in the tower. \
They slept in curved beds, kept a goat for its milk, and wrote down the weather four times a day in a green \
book. The longest storm in the book lasted nine days; the keepers lived on biscuit and rain water, and the \
goat ate one of the charts. In 1871 a lens from Paris replaced the mirrors. It floated on a bath of mercury \
and turned so easily that a child could move it with one finger, and its beam reached twenty miles.

Electricity came in 1932, by a cable that a trawler cut twice in the first year. The last keeper, Thomas Reed, \
left in 1984, when a computer on the mainland took over the lamp. He gave the green books, one hundred and \
seventy-nine of them, to the school of Eskmouth. The children copied the weather of every day into a table, \
and it turned out to be one of the longest records of rain on that coast. Today the tower is open on Sundays \
from May to September, and the lens still turns.

Question: who was the last keeper, and what did he give to the school of Eskmouth?"""
