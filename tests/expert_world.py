"""Monitor, expert servers and clients as processes, to which a fault script is done; the same as in simulation."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from coterie.errors import EngineError
from coterie.experts.monitor.calls import ask
from coterie.experts.monitor.messages import Status
from coterie.experts.transport.shared import PREFIX
from coterie.shm import sweep
from coterie.up.ports import PortChooser
from fault_scripts import CLIENTS, SERVERS

TINY = Path(__file__).parents[1] / "models" / "coterie-tiny"
SERVED = {name: ("0-31", "32-63")[half] for name, half in SERVERS.items()}
TIMES = ("--heartbeat-s", "0.1", "--suspect-after-s", "0.6", "--dead-after-s", "1.5")
LONG_S = 60.0
_SLOW_S = 0.15, 0.05  # stopped, running: a quarter of its speed


class ClientProcess:
    """What a client says."""

    def __init__(self, process):
        self.process, self.last = process, None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with self.process.stdout as lines:
            for line in lines:
                self.last = json.loads(line)


class ProcessWorld:
    """The processes by name; a context manager, which kills them.

    Args:
        folder: for their logs.
        servers: the experts of each, by name.
        clients: their names.
        load: tokens of a call, and calls in flight, of each client.
        options: of all servers.
    """

    def __init__(self, folder, *, servers=SERVED, clients=CLIENTS, load=(), options=()):
        self.servers, self.names_of_clients = servers, clients
        self.load, self.options = [str(one) for one in load], options
        self.folder, self.processes, self.clients, self.slowed = folder, {}, {}, {}
        (self.port,) = PortChooser(os.getpid()).ports(0, 1, "monitor")
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        for name in ("monitor", *self.servers):
            self.play("start", name)
        self.until_known()
        for name in self.names_of_clients:
            self.play("start", name)
        self.until(lambda: all(client.last for client in self.clients.values()), "clients to begin")
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        sweep(PREFIX)  # killed servers leave their memory to the next one that starts

    # --- what is done ----------------------------------------------------------------------------------

    def run(self, script, pace=0.6):
        """Do it, at its times times `pace`."""
        began_s = time.monotonic()
        for step in sorted(script, key=lambda step: step.at_s):
            time.sleep(max(0.0, began_s + pace * step.at_s - time.monotonic()))
            self.play(step.what, step.who)

    def play(self, what, who):
        if what == "start":
            self._start(who)
        elif what in ("slow", "fast"):
            self._slow(who, on=what == "slow")
        else:
            signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "go on": signal.SIGCONT, "drain": signal.SIGTERM}
            self.processes[who].send_signal(signals[what])
            if what == "kill":
                self.processes[who].wait()

    def _start(self, who):
        if who in self.processes:
            self.processes[who].wait(LONG_S)
        if who in self.names_of_clients:
            program = Path(__file__).with_name("expert_client.py")
            command, out = (str(program), self.url, str(TINY), who, *self.load), subprocess.PIPE
        else:
            command, out = ("-m", "coterie", "experts", *self._command(who)), subprocess.DEVNULL
        with (self.folder / f"{who}.log").open("a") as log:
            environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
            self.processes[who] = subprocess.Popen([sys.executable, *command], stdout=out, stderr=log, env=environment)
        if who in self.names_of_clients:
            self.clients[who] = ClientProcess(self.processes[who])

    def _command(self, who):
        if who == "monitor":
            return ("monitor", "--port", str(self.port), *TIMES)
        what = ("--experts", self.servers[who], "--name", who, "--monitor", self.url)
        return ("serve", str(TINY), *what, *self.options)

    def _slow(self, who, *, on):
        if on:
            over = self.slowed[who] = threading.Event()
            threading.Thread(target=self._stutter, args=(self.processes[who], over)).start()
        else:
            self.slowed.pop(who).set()

    @staticmethod
    def _stutter(process, over):
        stopped_s, running_s = _SLOW_S
        while not over.wait(running_s):
            process.send_signal(signal.SIGSTOP)
            time.sleep(stopped_s)
            process.send_signal(signal.SIGCONT)

    # --- what is seen ----------------------------------------------------------------------------------

    def until_known(self):
        """Wait until the monitor says of each server that runs that it serves, and of no other."""
        running = sorted(name for name in self.servers if self.runs(name))
        self.until(lambda: self.known() == [(name, "serving") for name in running], f"{running} to be known as serving")

    def known(self):
        """Name and state of each server that the monitor does not think dead."""
        try:
            rows = ask(self.url, "GET", "/status", Status).servers
        except EngineError:
            return None
        return sorted((row.name, row.state) for row in rows if row.state != "dead")

    def runs(self, name):
        return name in self.processes and self.processes[name].poll() is None

    def until(self, look, what):
        end_s = time.monotonic() + LONG_S
        while not look():
            if time.monotonic() > end_s:
                raise TimeoutError(f"waited for {what}; {self.known()}; logs in {self.folder}")
            time.sleep(0.02)
