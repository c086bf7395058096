"""The words that longread notes are made of; no name of a note is used in what else a note says."""

NAMES = (  # noqa: SIM905 words are read more easily without quotes
    "amber cedar coral delta ember flint grove heron ivory jade lotus maple onyx opal poppy quartz "
    "raven saffron velvet zinc"
).split()
"""Names of notes, and of places at which a trail ends."""

NOUNS = (  # noqa: SIM905
    "baker boat bridge candle castle cook door farmer garden horse key king lamp letter mill queen road sailor table "
    "tower wagon window"
).split()

ADJECTIVES = "big bright cold dark fast heavy kind lost new old quiet red small tall warm wise".split()  # noqa: SIM905

VERBS = "bought carried found helped made saw sold took wanted watched".split()  # noqa: SIM905

CODES = tuple("0123456789")
