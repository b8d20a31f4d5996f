"""Parts of scripts/gpu-check and scripts/gpu-bundle."""
