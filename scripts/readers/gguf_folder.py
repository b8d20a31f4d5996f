"""Writes a GGUF target as a Hugging Face folder in 32 bits, for engines that read folders only.

Usage: gguf_folder.py TARGET.gguf FOLDER
"""
import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

source, folder = sys.argv[1:]
place, name = os.path.split(os.path.abspath(source))
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
# The values are plain by now; the library would refuse to write what once was quantised.
model.hf_quantizer = None
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(folder)
AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)
