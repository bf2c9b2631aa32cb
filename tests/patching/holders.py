"""Ways to keep ``{toy}.owner:f``: the source of a module, and an expression that calls what it keeps."""

from __future__ import annotations

HOLDERS: dict[str, tuple[str, str]] = {
    "the same name": ("from {toy}.owner import f", "f()"),
    "an alias": ("from {toy}.owner import f as g", "g()"),
    "two aliases": ("from {toy}.owner import f as g, f as h", "g() + h()"),
    "a star import": ("from {toy}.owner import *", "f()"),
    "through a third module": ("from {toy}.middle import g", "g()"),
    "a class attribute": ("from {toy}.owner import f\nclass K:\n    call = f", "vars(K)['call']()"),
    "a staticmethod of a class": (
        "from {toy}.owner import f\nclass K:\n    call = staticmethod(f)",
        "K.call() + K().call()",
    ),
    "a classmethod of a class": (
        "from {toy}.owner import f\nclass K:\n    call = classmethod(f)",
        "vars(K)['call'].__func__()",
    ),
    "the getter of a property": (
        "from {toy}.owner import f\nclass K:\n    call = property(f)",
        "vars(K)['call'].fget()",
    ),
    "a class in a class": (
        "from {toy}.owner import f\nclass K:\n    class L:\n        call = f",
        "vars(K.L)['call']()",
    ),
    "a class in a function": (
        "from {toy}.owner import f\ndef make():\n    class K:\n        call = f\n    return K\nk = make()",
        "vars(k)['call']()",
    ),
    "a class in a dict": (
        "from {toy}.owner import f\ntable = {'k': type('K', (), {'call': f})}",
        "vars(table['k'])['call']()",
    ),
    "a default argument": ("from {toy}.owner import f\ndef use(call=f): return call()", "use()"),
    "a default argument among others": (
        "from {toy}.owner import f\ndef use(a=1, call=f, b=2): return (a, call(), b)[1]",
        "use()",
    ),
    "a keyword default": ("from {toy}.owner import f\ndef use(*, call=f): return call()", "use()"),
    "a default of a method": (
        "from {toy}.owner import f\nclass K:\n    def use(self, call=f): return call()",
        "K().use()",
    ),
    "a default of a lambda in a list": (
        "from {toy}.owner import f\nuses = [lambda call=f: call()]",
        "uses[0]()",
    ),
    "a dict value": ("from {toy}.owner import f\ntable = {'f': f}", "table['f']()"),
    "a nested dict value": ("from {toy}.owner import f\ntable = {'a': {'b': [f]}}", "table['a']['b'][0]()"),
    "a dict key": ("from {toy}.owner import f\ntable = {1: 1, f: 2, 3: 3}", "list(table)[1]()"),
    "a list": ("from {toy}.owner import f\nitems = [1, f, f]", "items[1]() + items[2]()"),
    "a tuple": ("from {toy}.owner import f\nitems = (1, f)", "items[1]()"),
    "a tuple in a tuple": ("from {toy}.owner import f\nitems = (1, (2, (3, f)))", "items[1][1][1]()"),
    "a tuple in a list in a dict": (
        "from {toy}.owner import f\nitems = {1: [(f, 1), f]}",
        "items[1][0][0]() + items[1][1]()",
    ),
    "a named tuple": (
        "from {toy}.owner import f\nfrom collections import namedtuple as make\np = make('P', 'call')(f)",
        "p.call()",
    ),
    "a set": ("from {toy}.owner import f\nitems = {f}", "next(iter(items))()"),
    "a frozenset": ("from {toy}.owner import f\nitems = frozenset([f])", "next(iter(items))()"),
    "a default dict": (
        "from {toy}.owner import f\nfrom collections import defaultdict\nd = defaultdict(list, a=f)",
        "d['a']()",
    ),
    "an ordered dict's key": (
        "from {toy}.owner import f\nfrom collections import OrderedDict\nd = OrderedDict([(f, 1), (2, 2)])",
        "next(iter(d))()",
    ),
    "a partial": ("from {toy}.owner import f\nfrom functools import partial\np = partial(f)", "p()"),
    "an argument of a partial": (
        "from {toy}.owner import f\nfrom functools import partial\np = partial(lambda call: call(), f)",
        "p()",
    ),
    "a keyword of a partial": (
        "from {toy}.owner import f\nfrom functools import partial\n"
        "p = partial(lambda *, call: call(), call=f)",
        "p()",
    ),
    "everything of a partial": (
        "from {toy}.owner import f\nfrom functools import partial\n"
        "class Call:\n    def __call__(self, a, *, b): return a() + b()\n"
        "p = partial(Call(), f, b=f)",
        "p()",
    ),
    "a closure": (
        "from {toy}.owner import f\ndef make():\n    g = f\n    return lambda: g()\ninner = make()\ndel f",
        "inner()",
    ),
    "a decorated function": (
        "from {toy}.owner import f\nimport functools\ndef deco(function):\n"
        "    @functools.wraps(function)\n    def outer(): return function()\n    return outer\ng = deco(f)",
        "g() + g.__wrapped__()",
    ),
    "a data class": (
        "from {toy}.owner import f\nfrom dataclasses import dataclass\n@dataclass\nclass Spec:\n"
        "    module: object\n    params: dict\nspec = Spec(f, {'inner': Spec(f, {'deep': f})})",
        "spec.module() + spec.params['inner'].module() + spec.params['inner'].params['deep']()",
    ),
    "a frozen data class": (
        "from {toy}.owner import f\nfrom dataclasses import dataclass\n@dataclass(frozen=True)\nclass Spec:\n"
        "    module: object\nspec = Spec(f)",
        "spec.module()",
    ),
    "a data class with slots": (
        "from {toy}.owner import f\nfrom dataclasses import dataclass\n"
        "@dataclass(frozen=True, slots=True)\nclass Spec:\n    module: object\nspec = Spec(f)",
        "spec.module()",
    ),
    "a data class default": (
        "from {toy}.owner import f\nfrom dataclasses import dataclass\n@dataclass\nclass Spec:\n"
        "    module: object = f",
        "Spec().module()",
    ),
    "a data class subclass": (
        "from {toy}.owner import f\nfrom dataclasses import dataclass\n@dataclass\nclass Spec:\n"
        "    module: object = f\n@dataclass\nclass Sub(Spec):\n    more: object = f\nspec = Sub()",
        "spec.module() + spec.more() + Sub().module()",
    ),
    "an instance attribute": (
        "from {toy}.owner import f\nclass K: pass\nk = K()\nk.call = f",
        "k.call()",
    ),
    "a namespace": (
        "from {toy}.owner import f\nfrom types import SimpleNamespace as N\nn = N(call=f)",
        "n.call()",
    ),
    "a private slot": (
        "from {toy}.owner import f\nclass K:\n    __slots__ = ('__call',)\n"
        "    def __init__(self): self.__call = f\n    def use(self): return self.__call()\nk = K()",
        "k.use()",
    ),
    "a function attribute": ("from {toy}.owner import f\ndef g(): pass\ng.call = f", "g.call()"),
}

STUCK: dict[str, tuple[str, str]] = {
    "a cache around it": (
        "from {toy}.owner import f\nimport functools\ng = functools.lru_cache(f)",
        "_lru_cache_wrapper",
    ),
    "a deque": (
        "from {toy}.owner import f\nfrom collections import deque\nd = deque([f])",
        "an instance of collections.deque",
    ),
}
