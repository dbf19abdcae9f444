"""Which modules an adapter_config.json of PEFT names: target_modules less what is excluded, in some layers. Pure.

Source: tuners_utils.check_target_module_exists of peft 0.21. What is not named peft does not load, so it is refused.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

ALL_LINEAR = "all-linear"
Names = Sequence[str] | str


@dataclass(frozen=True, slots=True)
class Targets:
    """A list holds whole names or their last parts, a text is one pattern for whole names. Patterns must compile.

    `layers` chooses among a list's last parts alone, by the number after one of `layer_patterns`, or after any name.
    """

    modules: Names
    excluded: Names = ()
    saved: Sequence[str] = ()
    layers: Sequence[int] = ()
    layer_patterns: Sequence[str] = ()

    def has(self, module: str) -> bool:
        """Whether the adapter changes this module, by the name that it has in the base."""
        if _is_named(module, self.excluded) or any(re.match(rf"(^|.*\.){one}($|\..*)", module) for one in self.saved):
            return False
        if isinstance(self.modules, str) and self.modules.lower() == ALL_LINEAR:
            return not module.endswith(("lm_head", "embed_tokens"))
        if isinstance(self.modules, str) or not self.layers or module in self.modules:
            return _is_named(module, self.modules)
        return _is_named(module, self.modules) and self._layer(module) in self.layers

    def _layer(self, module: str) -> int | None:
        for pattern in self.layer_patterns or (r"[^.]*",):
            if found := re.match(rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\.", module):
                return int(found["layer"])
        return None


def _is_named(module: str, names: Names) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
