"""What the codes of our formats stand for.

CODEBOOKS: name -> uint8 (entries,) for one column a code, or (entries, 2) for two; entry - 64 is the value, -64..63.

Made by `python tests/bench/design_codebooks.py model.safetensors` (which says from what data): Lloyd's algorithm
around search.py's own choice of scales, so each table fits what blocks of 32 look like after their scale is chosen.
A scale may be negative, which mirrors the table: they are not symmetric, and one table serves as two.
"""

from __future__ import annotations

import numpy as np

from llmc.compiler.formats.block import U8

_PAIRS = {
    "c2": "054421192437274e2a6a3740392c3e514308453e4b6b4d29514f5a3c6c247052",
    "c2h": (
        "0349102d1a5f1d44231625322b4f2e41332433603379343539503a443c003e3a412d431b4441445c454d4a374f6e5044"
        "5129535459385c146146665d6a2d7c45"
    ),
    "c3": (
        "00410e57142d15431e511f39206722212545283129592a3c2d4e2e133027314632763334333e34623656374c393c3944"
        "3a1d3b2a3c343f413f4a403a4052405d4100416b442f4524454546154637473f484d4a564b794c634d344e3d4e464f2b"
        "524f531f56365740575a590e5a485c6c5d2b61396251682069446a5f72347b4c"
    ),
    "c3h": (
        "0038024a0b260f42105b106a1135134d170f182b193c1b1d1b471d521e6a1f5d20362241232c240d244b26212754283c"
        "2878293429462a5d2b2b2c692d4d2e402f152f213032303a30563146322b340334413460354b35783624363736523731"
        "373c381b3946395a396b3a2b3a403b353b4c3c3a3d103d303d533e243e623f3e3f4340484135414e421c422c423a427f"
        "433f435a453245444553456d460146244638464b483d492b4a634b1a4b324b424b484c384c504c584e264f0e4f3d502e"
        "5044524c52725336541f545e553e55545629564659315a395b4c5b685c425e105f1d5f286052605b6233633d64476a2b"
        "6c506e206e376f6170437c2b7d527f3e"
    ),
}
_SCALARS = {
    "c4": "00131d252c32373c41464b50565d6670",
    "c5": "01070e13191e2226292c2f3235383b3d3f414345484a4d505356595d61656a72",
    "c6": (
        "06080b0d101316181b1e20222426282a2c2e2f31323335363738393a3b3c3d3e3f404142434445464748494a4b4c4d4f"
        "5051535557595b5d5f61636567696c6f"
    ),
}

for _name in ("c6", "c5", "c4"):
    _SCALARS["r" + _name[1:]] = _SCALARS[_name]
_PAIRS["r3h"] = _PAIRS["c3h"]
CODEBOOKS: dict[str, U8] = {
    **{name: np.frombuffer(bytes.fromhex(text), np.uint8).reshape(-1, 2) for name, text in _PAIRS.items()},
    **{name: np.frombuffer(bytes.fromhex(text), np.uint8) for name, text in _SCALARS.items()},
}
