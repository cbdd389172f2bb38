"""What coterie finds in small random models: `survey_routers.py FOLDER`, whose subfolders hold a config.json each.

Prints {NAME: [layers, experts, top-k, scoring, cached]} as JSON, or an error's text in place of the list; `cached`
says whether a text that is forwarded with a cache, its last tokens one by one, chooses as in one pass.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers as hf

from coterie.calibration.sources.routers import find_routers, listening
from coterie.calibration.sources.tape import Tape
from coterie.errors import UnsupportedError


def survey(folder):
    torch.manual_seed(0)
    config = hf.AutoConfig.from_pretrained(folder)
    if hasattr(config, "kv_lora_rank"):
        config.head_dim = config.qk_rope_head_dim  # else it is a shape that does not run
    model = hf.AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
    for name, tensor in model.named_parameters():
        if tensor.dim() > 1:
            tensor.data.normal_(0, 0.5 if "router" in name or ".gate." in name else 0.08)
    try:
        found = find_routers(model)
    except UnsupportedError as error:
        return str(error)
    geometry = found.geometry
    return [geometry.layers, geometry.experts, geometry.top_k, found.scoring, cached_alike(model, found)]


def cached_alike(model, found):
    tokens = torch.arange(20, 60)[None]
    whole, parts = Tape(found), Tape(found)
    with torch.inference_mode():
        with listening(found.layers, whole):
            model(input_ids=tokens, use_cache=False)
        with listening(found.layers, parts):
            cache = None
            for part in (tokens[:, :32], *tokens[:, 32:].split(1, dim=1)):
                cache = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    return np.array_equal(np.sort(whole.ids(), axis=-1), np.sort(parts.ids(), axis=-1))


print(json.dumps({folder.name: survey(folder) for folder in sorted(Path(sys.argv[1]).iterdir())}))
