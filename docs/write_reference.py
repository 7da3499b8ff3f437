"""Write the reference of the recipe from its fields: ``make docs``."""

from __future__ import annotations

import json
from pathlib import Path

from megalith.recipe.explain import markdown, schema

INTRODUCTION = """\
# The recipe

One TOML file describes the work, and every verb reads it. Every field has a default, so a recipe is
as short as its idea. This page is written by `make docs` from the fields themselves; on the command
line `megalith recipe explain SECTION.FIELD` says the same.

- **Override** a field: `megalith train x.toml train.steps=200 model.layers=4`. The value is written
  as in TOML, and quotes around text may be left out. `none` means no value.
- **Look** at the result: `megalith recipe show x.toml train.steps=200`, with `--comments` for the
  meaning of each field.
- **Check** it: `megalith recipe check x.toml`. A wrong recipe is refused before any work, in one
  line that names the field, what is wrong and what is nearest.
- **In an editor**: `megalith recipe schema > recipe.schema.json`, and as the recipe's first line
  `#:schema recipe.schema.json`. Editors that use taplo (Even Better TOML) then complete and check.
  The schema of this version is [recipe.schema.json](recipe.schema.json).
- **Your own code**: a field that takes `'package.module:name'` takes an object of yours. It is
  looked for in the working folder and among the installed packages.

In TOML, which has no word for it, `none` is written as `"none"` where a field's default is another.

"""


def reference() -> str:
    """The text of ``docs/recipe.md``."""
    return INTRODUCTION + markdown()


def schema_text() -> str:
    """The text of ``docs/recipe.schema.json``."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    here = Path(__file__).parent
    (here / "recipe.md").write_text(reference(), encoding="utf-8")
    (here / "recipe.schema.json").write_text(schema_text(), encoding="utf-8")
