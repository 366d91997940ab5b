"""One engine in a process of its own: `engine.py SPECIFICATION RESULT`, both JSON. Loads, answers, reports, ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Runs the groups of prompts one after the other; the prompts of a group arrive together."""
    from vllm import LLM, SamplingParams

    specification = json.loads(Path(sys.argv[1]).read_text())
    base, watched = specification.get("base"), specification.get("watch")
    defaults = {"dtype": "float32", "max_num_seqs": 16, "max_model_len": 64, "seed": 0, "disable_log_stats": True}
    llm = LLM(
        **{**defaults, **specification["engine"]},
        additional_config={} if base is None else {"base": base},
        worker_extension_cls="watch.Watch" if watched else "",
    )
    if watched:
        llm.collective_rpc("watch", args=(watched == "experts",))
    sampling = SamplingParams(temperature=0.0, **specification["sampling"])
    result: dict = {"tokens": [], "texts": []}
    for group in specification["groups"]:
        for output in llm.generate(group, sampling, use_tqdm=False):
            result["tokens"].append(list(output.outputs[0].token_ids))
            result["texts"].append(output.outputs[0].text)
    if base is not None and base["budget"] != "off":
        result["stats"] = llm.collective_rpc("base_stats")
    if watched:
        result["seen"] = llm.collective_rpc("records_so_far")
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
