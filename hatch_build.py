"""Puts kernels that scripts/release has compiled into a wheel, which is then for their system."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Kernels(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Reads ODYSSEY_WHEEL, a folder with `tag`, `sbom/` and `kernels/`.

        Without it the wheel is for all systems.
        """
        home = os.environ.get("ODYSSEY_WHEEL")
        if not home or version == "editable":
            return
        build_data["pure_python"] = False
        build_data["tag"] = (Path(home) / "tag").read_text().strip()
        build_data["force_include"][f"{home}/kernels"] = "odyssey/_kernels"
        build_data["sbom_files"] += sorted(map(str, (Path(home) / "sbom").iterdir()))
