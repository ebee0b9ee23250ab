"""Sentences made by rule from short word lists: what the demonstration tokenizer is trained on.

All text is made here, from a seed; nothing is read from files or copied from anywhere. Knows
no tokenizer and no model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    "answer apple arm baker basket beach bell bird block boat book bottle branch bread bridge "
    "brother bucket butter cable candle captain castle cat chain chair child city clock cloud "
    "coast coin cook corner cotton country cousin cup curtain desert dinner doctor dog door "
    "dream driver drum eagle engine evening farmer father feather field finger fire fish flame "
    "floor flower forest friend fruit garden gate girl glass grain guest hammer harbour hat "
    "heart hill honey horse hour house island jacket journey kettle key kitchen ladder lake "
    "lamp leaf letter library light lion machine market master meadow memory message mirror "
    "model money moon morning mother mountain mouse music needle night number ocean orange oven "
    "painter paper path pencil people pepper picture pillow pilot plate pocket poet pool potato "
    "problem queen question rabbit rain reader ribbon river road rock roof room rose sailor "
    "salt sand school sea season servant shadow sheep ship shirt shoulder silver singer sister "
    "sky snow soldier song spoon spring star station stone story stranger street sugar summer "
    "sun table tailor teacher thread thunder ticket tiger tongue tower train traveller tree "
    "valley village voice wagon wall water weather week wheel wind window winter wolf woman "
    "wood word worker writer year"
)
VERBS = _words(
    "accept answer ask borrow bring build burn call carry catch change clean climb close collect "
    "compute cook count cover cross dance deliver describe discover draw dream drink drop enter "
    "explain fill find finish fold follow forget gather give grow guard guess happen hear help "
    "hide hold invent invite join jump keep kick know laugh lead learn leave lend lift listen "
    "load look lose love mark measure meet mend miss move need notice obey offer open order "
    "paint pass pay plant play point pour promise pull push reach read receive remember rent "
    "repair return ride ring run save search see sell send share shout show sing sleep smile "
    "speak spend stand start stay stop study support swim take teach tell test thank think throw "
    "touch travel trust try turn visit wait walk want warn wash watch wear win wish wonder work "
    "write"
)
QUALITIES = _words(
    "able angry bitter black blue brave bright broad broken brown busy calm careful cheap clean "
    "clear clever cold common cool curious dark deep different dry early easy empty equal fair "
    "famous fast final fine flat free fresh full gentle glad golden good grand great green grey "
    "happy hard heavy high honest hot huge kind large late lazy light little lonely long loud "
    "lucky modern narrow near new noisy old open pale patient plain polite poor proud pure quick "
    "quiet rare ready red rich round rough sad safe sharp short shy silent simple slow small "
    "soft solid sour steady strange strong sudden sweet tall thick thin tired tiny true unusual "
    "warm weak wet white whole wide wild wise wooden wrong yellow young"
)
_BETWEEN = _words(
    "above across after along among around before behind below beside beyond during for from "
    "inside into near of off on over past through to towards under until upon with without"
)
_JOINING = _words("and but or because while although when where if since so that then until")
_NAMES = _words(
    "Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Karin Lukas Maria Nils Olga Paul "
    "Rosa Simon Tara Viktor"
)
_OPENINGS = _words("What Why How Where When Who Which Please Tell Explain Write Could Would")


def sentences(count: int, seed: int = 0) -> Iterator[str]:
    """`count` lines: prose, questions, numbers, records and code, mixed."""
    choose = random.Random(seed)
    kinds = (_statement, _statement, _statement, _question, _sum, _record, _code)
    for _ in range(count):
        yield choose.choice(kinds)(choose)


def _things(choose: random.Random) -> str:
    noun = choose.choice(NOUNS)
    form = choose.random()
    if form < 0.25:
        return f"{choose.choice(('two', 'three', 'many', 'some', 'all', 'these'))} {noun}s"
    quality = choose.choice(QUALITIES)
    if form < 0.5:
        return f"the {quality} {noun}"
    if form < 0.6:
        return f"the {quality}ness of the {noun}"
    return f"{choose.choice(('a', 'the', 'my', 'your', 'her', 'our', 'this'))} {noun}"


def _doing(choose: random.Random) -> str:
    verb = choose.choice(VERBS)
    stem = verb[:-1] if verb.endswith("e") else verb
    form = choose.randrange(5)
    return (f"{verb}s", f"{stem}ed", f"is {stem}ing", f"will {verb}", f"can not {verb}")[form]


def _clause(choose: random.Random) -> str:
    subject = choose.choice(_NAMES) if choose.random() < 0.3 else _things(choose)
    how = f" {choose.choice(QUALITIES)}ly" if choose.random() < 0.3 else ""
    where = f" {choose.choice(_BETWEEN)} {_things(choose)}" if choose.random() < 0.6 else ""
    return f"{subject} {_doing(choose)}{how} {_things(choose)}{where}"


def _statement(choose: random.Random) -> str:
    text = _clause(choose)
    if choose.random() < 0.4:
        text += f"{choose.choice((',', ';', ''))} {choose.choice(_JOINING)} {_clause(choose)}"
    return text[0].upper() + text[1:] + choose.choice("...!")


def _question(choose: random.Random) -> str:
    return f"{choose.choice(_OPENINGS)} {_clause(choose)}?"


def _sum(choose: random.Random) -> str:
    left, right = choose.randrange(1000), choose.randrange(1000)
    return f"{left} + {right} = {left + right}, and {left} - {right} = {left - right}."


def _record(choose: random.Random) -> str:
    key, value = choose.choice(NOUNS), choose.choice(QUALITIES)
    number = choose.randrange(100)
    return f'{{"name": "{choose.choice(_NAMES)}", "{key}": "{value}", "count": {number}}}'


def _code(choose: random.Random) -> str:
    name, thing = choose.choice(VERBS), choose.choice(NOUNS)
    return f"def {name}_{thing}({thing}):\n    return {thing}[{choose.randrange(10)}]\n"
