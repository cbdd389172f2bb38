"""Print routed experts as vLLM's server encodes them: `encode_routed.py IDS.npy`."""

import sys

import numpy as np
from vllm.utils.serial_utils import numpy2base64

print(numpy2base64(np.load(sys.argv[1])))
