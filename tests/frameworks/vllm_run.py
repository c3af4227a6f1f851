"""What vLLM generates: `vllm_run.py RESULT FORMAT=FOLDER[=CHECKPOINT]...`, one model after another. Tokens and their log-probabilities go to RESULT."""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

from vllm import LLM, SamplingParams


def generate(load_format: str, folder: str, checkpoint: str | None = None) -> list[list[float]]:
    model = LLM(
        folder,
        load_format=load_format,
        model_loader_extra_config={} if checkpoint is None else {"checkpoint": checkpoint},
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
    )
    how = SamplingParams(max_tokens=8, temperature=0, logprobs=1, detokenize=False, ignore_eos=True)
    (answer,) = model.generate([{"prompt_token_ids": [1, 2, 3, 4]}], how, use_tqdm=False)
    said = answer.outputs[0]
    return [
        [token, chances[token].logprob]
        for token, chances in zip(said.token_ids, said.logprobs, strict=True)
    ]


if __name__ == "__main__":
    results = [generate(*what.split("=")) for what in sys.argv[2:]]
    Path(sys.argv[1]).write_text(json.dumps(results))
