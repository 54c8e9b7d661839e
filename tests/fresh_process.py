"""Code run in a process that has imported nothing of hf_ext or Transformers, without paying for torch each time."""

import json
import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]
# Imports what is slow once, then forks for each piece of code that it reads: a fork shares memory, not later imports.
SERVER = """
import importlib, json, os, sys, traceback
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        os.dup2(write, 2)
        status = 1
        try:
            exec(compile(json.loads(line), "<fresh process>", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    os.close(write)
    with os.fdopen(read, errors="replace") as output:
        text = output.read()
    print(json.dumps([os.waitpid(child, 0)[1], text]), flush=True)
"""


class FreshProcesses:
    """A context manager that runs code in fresh processes, with the modules of `preload` already imported."""

    def __init__(self, *preload: str):
        self.command = [sys.executable, "-c", SERVER, *preload]

    def __enter__(self):
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.server = subprocess.Popen(self.command, cwd=ROOT, env=environment, text=True, **pipes)
        return self

    def run(self, code: str) -> str:
        """What `code` prints to stdout and stderr; fails the test with it if `code` raises."""
        print(json.dumps(code), file=self.server.stdin, flush=True)
        status, output = json.loads(self.server.stdout.readline())
        assert status == 0, output
        return output

    def __exit__(self, *error):
        self.server.stdin.close()
        self.server.wait()
