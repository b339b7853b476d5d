"""Configurations from files and flags: what stands in the way of a valid one is said in one paragraph."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic import ValidationError

from runflat.config import TrainConfig
from runflat.errors import ConfigError
from runflat.power.sections import Section


def load_config(path: Path | None) -> TrainConfig:
    """Configuration in a TOML file; None gives the defaults.

    Raises:
        ConfigError: no such file, not TOML, an unknown key, a wrong type or value, or keys that contradict each other.
    """
    if path is None:
        return TrainConfig()
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The configuration {path} cannot be read: {error}. Name a TOML file, or leave it out for the defaults."
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"The configuration {path} is not TOML: {error}. Strings stand in quotes, and each section starts with its "
            f"name in brackets, such as [train]."
        ) from error
    try:
        # By way of JSON, because that is where pydantic's strict mode still takes lists for tuples and text for paths.
        return TrainConfig.model_validate_json(json.dumps(tables, default=str), strict=True)
    except ValidationError as error:
        raise config_error(error, TrainConfig, source=f"The configuration {path}") from error


def config_error(error: ValidationError, section: type[Section], source: str = "The configuration") -> ConfigError:
    """`ConfigError` of one paragraph for what pydantic found: each key, its value, its limit, and a near valid key.

    Args:
        error: raised by building `section`.
        section: `TrainConfig` or the class of one of its sections; keys are named from the top in both cases.
        source: where the values stand, the subject of the sentence.
    """
    outer = [name for name, field in TrainConfig.model_fields.items() if field.annotation is section]
    problems = [_problem(detail, [*outer, *detail["loc"]]) for detail in error.errors(include_url=False)]
    return ConfigError(f"{source} is not valid: {'; '.join(problems)}.")


def flag_rules() -> tyro.constructors.ConstructorRegistry:
    """Context manager under which `tyro.cli` builds sections with this module's errors instead of its own.

    Without it tyro prints pydantic's raw report and exits; with it a bad value leaves `tyro.cli` as a `ConfigError`.
    Defaults (`tyro.cli(..., default=load_config(path))`) and help texts are those of the fields.
    """
    registry = tyro.constructors.ConstructorRegistry()

    @registry.struct_rule
    def _(info: tyro.constructors.StructTypeInfo) -> tyro.constructors.StructConstructorSpec | None:
        section = info.type
        if not (isinstance(section, type) and issubclass(section, Section)):
            return None
        default = info.default if isinstance(info.default, section) else section()

        def build(**values: Any) -> Section:
            try:
                return section(**values)
            except ValidationError as error:
                raise config_error(error, section) from error

        flags = []
        for name, field in section.model_fields.items():
            # pydantic moves the annotations of a field into its metadata; tyro wants them back
            kind: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
            text = " ".join((field.description or "").split())
            flags.append(tyro.constructors.StructFieldSpec(name, kind, getattr(default, name), text))
        return tyro.constructors.StructConstructorSpec(instantiate=build, fields=tuple(flags))

    return registry


def _problem(detail: Mapping[str, Any], loc: list[str | int]) -> str:
    """One problem as a clause."""
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")
    if detail["type"] == "extra_forbidden":
        return f"there is no key {key}{_suggestion(str(loc[-1]), key)}"
    if detail["type"] == "model_type":
        return f"{key} is {detail['input']!r}, but it is a section; write its keys under [{key}]"
    return f"{key} is {detail['input']!r}: {detail['msg'].replace('Input should be', 'it must be')}"


def _suggestion(name: str, key: str) -> str:
    """Nearest valid key: one in the same section if there is one, else anywhere, else the list of what is there."""
    keys = list(_all_keys())
    section = key.rpartition(".")[0]
    siblings = [other for other in keys if other.rpartition(".")[0] == section]
    for candidates in (siblings, keys):
        by_name = {other.rpartition(".")[2]: other for other in candidates}
        near = difflib.get_close_matches(name, by_name, n=1)
        if near:
            return f"; the nearest is {by_name[near[0]]}"
    return f"; the keys there are {', '.join(siblings)}" if siblings else ""


def _all_keys() -> Iterator[str]:
    """Every key and section name, dotted."""
    for name, field in TrainConfig.model_fields.items():
        yield name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from (f"{name}.{inner}" for inner in field.annotation.model_fields)
