"""What may stand behind a number: a unit or nothing. One closed rule, for both readers and for golds.

A unit is a measure of the table below or a plural noun, with words before it that describe it ('old toy
trains') and, behind it, 'of ...', 'per ...', 'a day', 'each', 'left', 'in total', 'in the shop'. Function
words (not, would, or, too, ...), number words and words of other scripts are no part of a unit, so no list of
denials is needed: '72 isn't right', '72 quadrupled' and '7 Millionen' cannot be read as a unit.
"""

import re
from typing import NamedTuple

MONEY = "$\u00a2\u00a3\u00a4\u00a5\uffe1\uffe5" + "".join(map(chr, range(0x20A0, 0x20C1)))
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
SMALL = {word: i for i, word in enumerate(_ONES.split())}
TENS = {w: 10 * i for i, w in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)}
# number words, which change the number before them; -illion and -illiard are alike in many languages
_FRACTIONAL = (
    r"halves|half|(?:third|fourth|(?:fif|six|seven|eigh|nin|ten|eleven|twelf|\w{2,9}teen|\w{2,9}tie"
    r"|hundred|thousand|[a-z]{1,8}illion)th)s?"
    # and in Romance languages: tercios, doceavos, dixi\u00e8mes, centesimi
    r"|demis?|tierce?s|(?:terci|terceir|ter\u00e7|cuart|quart|quint|sext|oct?av|oitav|noven|non)[oai]s?"
    r"|\w{2,9}(?:i[e\u00e8]me|[a\u00e1]vo|[e\u00e9]sim[oai])s?|(?:d[e\u00e9]|s[e\u00e9]p?t)[ct]?im[oai]s?"
)
_SCALES = (
    r"(?:m|b|tr|quadr|quint|sext|sept|oct|non|dec)[iy]l+[ijyh]?(?:o|\u00f3|\u00f5|\u00e3|ar)\w*"
    r"|m(?:il?|l)?rd|ml[nd]|mi[loa]|m[il]ll|bil|bln|tln|trn?|grand|gross|score|hundreds?|thousands?"
    r"|la(?:kh|c)s?|crores?|[a-z]*illi(?:on|ard)s?|googols?|myriads?"
    r"|milliers?|milhares|migliaia|cientos|cent(?:aines?|enas?|inaia)|d(?:i|ou)[zc]aines?|d[eo][cz]enas?|d[uo]zzine|dutzend[es]?"
    r"|tens|h[uo]nd(?:ert|erd|ra|re)|tausend|duizend|tusen|tusind|mil(?:le|a|y|l?)"
)
NUMBER_WORD = re.compile(
    rf"(?:{_FRACTIONAL}|{_SCALES}|(?:{'|'.join([*SMALL, *TENS])})(?:s|es|th|-\w+)?)", re.I
)
# a measure, then its other spellings (in the singular)
_MEASURES = """
    cm centimeter centimetre | mm millimeter millimetre | m meter metre | km kilometer kilometre |
    in inch inches | ft foot feet | yd yard | mi mile | g gram | kg kilogram kilo | mg milligram |
    \u03bcg microgram | t ton tonne | lb pound | oz ounce | l liter litre | ml milliliter millilitre |
    gal gallon | pt pint | qt quart | cup | tbsp tablespoon | tsp teaspoon | s sec second | min minute |
    h hr hour | day | week wk | month mo | year yr | decade | century centuries | $ dollar usd buck |
    \u20ac euro eur | \u00a3 gbp quid | \u00a2 cent penny pennies pence | \u00a5 yen jpy yuan cny rmb |
    \u20b9 rupee inr rs | % percent pct | \u00b0 degree deg | celsius c | fahrenheit f | kelvin k |
    rad radian | mph | kph kmh | w watt | kw | kwh | v volt | a amp ampere | j joule | n newton | pa |
    hz hertz | b byte | kb | mb | gb gigabyte | tb | cal calorie | kcal | acre | sqft | dozen | pair |
    piece pc | unit | \u03c9 ohm | \u5143 | \u5186 | \uc6d0 | o'clock | am | pm | fl | person people |
    man men | woman women | child children | mouse mice | goose geese | tooth teeth | ox oxen | dice |
    wolf wolves | knife knives | life lives | leaf leaves | loaf loaves | half-hour | sheep | times time |
    change | profit | fruit | worth | wpm | fish | deer | cattle | staff | aircraft | chf | cad | aud | nzd |
    sgd | hkd | mxn | brl | zar | krw | sek | nok | dkk | pln | php | thb | idr | myr | kr
"""
_CANONICAL = {word: group.split()[0] for group in _MEASURES.split("|") for word in group.split()}
_LENGTHS = set("m cm mm km ft in yd mi".split())
LENGTHS = [word + end for word, unit in _CANONICAL.items() if unit in _LENGTHS for end in ("", "s")]
LETTER_UNITS = set("mghslLCFWVJKNAt\u03bc\u03a9\u5143\u5186\uc6d0")
_A_WHAT = set("piece ticket item bag box bottle pack night trip class game head share bird".split())
_LEFT = set(
    "left leftover remaining more extra total altogether together combined overall each apiece".split()
)
_LEFT |= set(
    "daily weekly monthly yearly annually sold bought made eaten spent earned saved needed used".split()
)
_DIMENSIONS = set(
    "old long wide tall high deep far away apart ago late early square cubic now today originally".split()
)
_DIMENSIONS |= set(
    "later earlier older younger longer shorter taller wider deeper heavier lighter faster slower "
    "higher lower".split()
)
_PLACES = set("in on at for from with by during near inside".split())
_DETERMINERS = set("the his her their its my our your this that these those".split())
_NO_UNIT = set(  # the closed classes of English words, and the few words in -s that are verbs or adverbs
    "not no never none nor neither nobody nothing nowhere without cannot hardly barely scarcely i "
    "you he she it we they me him them who whom which what when where why how here there hers mine "
    "ours yours theirs is are was were be been being am do does did done has have had having will "
    "would shall should can could may might must ought isnt arent wasnt dont doesnt didnt wont cant "
    "and or but if then else than while because since though although unless until so as yet whether "
    "to by plus minus sure error doubt mistake vain dispute less over under above below between "
    "versus vs mod modulo into through against about after before around some any all both either "
    "few many much too very quite rather only just also even still already almost nearly "
    "approximately approx roughly exactly maybe perhaps possibly probably let says means makes gives "
    "gets goes becomes fails fits lacks misses needs seems looks appears feels sounds contradicts "
    "violates exceeds disagrees conflicts equals squares cubes doubles triples halves remains works "
    "breaks overshoots undershoots upwards downwards afterwards backwards forwards towards always "
    "perhaps sometimes besides nonetheless nevertheless regardless oops whoops yes thanks tops guess "
    "minuses err errs guesses pi inf nan infinity true false sqrt log ln sin cos tan exp st nd rd th "
    "xy yz xz xyz negatives lies sucks differs clashes alas thus pas jamais jam\u00e1s sans nichts niemals "
    "keinesfalls keineswegs moins menos mas m\u00e1s mais apenas mindestens wenigstens h\u00f6chstens".split()
)
# no plural nouns: bogus, overestimates, misleads
_NO_PLURAL = re.compile(
    r"\w*(?:[^enrm]us)|(?:over|under)\w{5,}|(?:on|in|out|after|home|(?:ea|we)st)wards|mis[^st]\w{3,}"
)
_TOKEN = re.compile(
    r"\s*(?:(?P<word>[A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u00ff\u03bc\u03a9\u5143\u5186\uc6d0]+"
    r"(?:['-][A-Za-z\u00c0-\u00ff]+)*\.?)(?P<power>\s*\^\s*(?:[23](?!\d)|\{[23]\})|[23](?!\d))?"
    rf"|(?P<mark>[/%\u00b0{MONEY}]))"
)
_IDIOMS = [
    (re.compile(pattern, re.I), new)
    for pattern, new in (
        (r"\bin (?:total|all)\b", "total"),
        (r"\bleft over\b", "left"),
        (r"\ball together\b", "altogether"),
        (r"(?<!in )\beach (?=[a-z])", "per "),
        (r"\bper ?cent\b", "%"),
        (r"\b([ap])\.\s?m\b\.?", r"\1m"),
        (r"\bsq(?=[. ])", "square"),
        (r"\bmph\b", "miles per hour"),
        (r"\bk(?:mh|ph)\b", "km per hour"),
        (r"(?<!in )(?<!for )\b(?:this|that|last|next) (?=(?:day|week|month|year)\b)", "in this "),
    )
]
# H a head, M a mark, W a describing word, G one in -ing, L left, D old, O of, P per, A a, R in, T the, N and:
# 'old toys per box in the shop' is WHPWRTW
_GRAMMAR = re.compile(
    "M?[WLDG]{0,4}[HM]{0,3}D{0,2}(?:(?<![WLG])OT?[WLHDG]{1,4})?(?:P[WHLDG]{1,3}|AH)*(?:(?<=H)G[WHT]{0,3})?"
    "[DL]{0,2}(?:R[TA]?[WLHDG]{1,4}(?:N[TA]?[WLHDG]{1,3})?){0,2}[DL]{0,2}"
)
_HEADED = re.compile("[^R]*[HML]|[PA]")
_INCH = re.compile(r"\s*(?:[/^]|(?:long|wide|tall|high|deep)\b)")
_NO_NOUN = re.compile(r"(?:ed|ing|ly|ble|ful|ous|ive|id|ong|ect)\W*$")


class Unit(NamedTuple):
    """What is measured (cm, /h, m^2) and the words for what is counted ({'apple', 'red'})."""

    measures: frozenset = frozenset()
    words: frozenset = frozenset()

    def agrees(self, other: "Unit") -> bool:
        """Whether both may name one thing; a missing unit agrees with any."""
        if not any(self) or not any(other):
            return True
        shared = not self.words or not other.words or self.words & other.words
        return self.measures == other.measures and bool(shared)


def read_unit(tail: str, money: str = "", one: bool = False) -> Unit | None:
    """The unit that this text behind a number is, empty for no text; None if it is something else.

    one: the number is 1 or a part of 1, so the unit may be a noun in the singular ('1/2 pizza').
    """
    tail = tail.strip(" \u00a0")
    if not tail and not money:
        return Unit()
    if len(tail) > 120:
        return None
    for idiom, new in _IDIOMS:
        tail = idiom.sub(new, tail)
    kinds, position, measures, words, prefix = "", 0, set(), set(), ""
    if money.strip():
        code = money.lower().strip(" .")
        measures.add(_CANONICAL.get(code, code[-1]))
    while position < len(tail):
        token = _TOKEN.match(tail, position)
        if token is None:
            return None
        position = token.end()
        kind, name = ("P" if token["mark"] == "/" else "M", token["mark"]) if token["mark"] else _kind(token)
        if name == "in" and _TOKEN.match(tail, position) and not _INCH.match(tail, position):
            kind = "R"
        if "R" in kinds and name in ("and", "may"):  # in April and May
            kind = "N" if name == "and" else "W" if token["word"] == "May" else kind
        kinds += kind
        if "R" in kinds:
            continue  # 'miles from home' are miles
        if kind in "PA":
            prefix = "/"
        elif kind in "HM" and name in _CANONICAL:
            power = re.sub(r"\D", "", token["power"] or "") if token["mark"] is None else ""
            power = power or ("2" if "square" in words else "3" if "cubic" in words else "")
            words -= {"square", "cubic"}
            measures.add(prefix + _CANONICAL[name] + power)
            prefix = ""
        elif prefix:
            measures.add(prefix + name)
            prefix = ""
        elif kind in "HWDG":
            words.add(name)
    headed = not kinds or _HEADED.match(kinds) or (money and kinds[0] in "RO")
    headed = headed or (one and kinds == "W" and not _NO_NOUN.search(tail))
    if not headed or (kinds[:1] == "O" and not money) or not _GRAMMAR.fullmatch(kinds):
        return None
    return Unit(frozenset(measures), frozenset(words))


def _kind(token) -> tuple[str, str]:
    """(class, singular in lower case) of a word behind a number; class X is no part of a unit."""
    word = token["word"].rstrip(".")
    lower = word.lower()
    name = lower[:-1] if lower.endswith("s") and len(lower) > 2 and not lower.endswith("ss") else lower
    if len(word) == 1 and word not in LETTER_UNITS and word != "a":
        return "X", name
    if (token["power"] or "").isdigit() and lower not in LENGTHS:
        return "X", name  # m2 is a unit, men2 is not
    if lower in ("a", "an"):
        return "A", name
    if lower in ("per", "every"):
        return "P", name
    if lower == "of":
        return "O", name
    for kind, known in (("L", _LEFT), ("D", _DIMENSIONS), ("R", _PLACES - {"in"}), ("T", _DETERMINERS)):
        if lower in known:
            return kind, lower
    if lower in _CANONICAL or (lower not in _NO_UNIT and (name in _CANONICAL or name in _A_WHAT)):
        return "H", lower if lower in _CANONICAL else name
    apostrophe = "'" in lower and not lower.endswith(("'s", "s'"))
    if lower in _NO_UNIT or apostrophe or _NO_PLURAL.fullmatch(lower) or NUMBER_WORD.fullmatch(lower):
        return "X", name
    return ("H", name) if name != lower else ("G" if name.endswith("ing") else "W", name)
