"""The placement environment (Gymnasium) and its batched form (Stable-Baselines3).

Importing this package registers `autoshard/Placement-v0`:

    gymnasium.make("autoshard/Placement-v0", tasks=..., cost_model=..., config=...)
"""

from __future__ import annotations

import gymnasium

if "autoshard/Placement-v0" not in gymnasium.registry:
    gymnasium.register(id="autoshard/Placement-v0", entry_point="envs.placement_env:PlacementEnv")
