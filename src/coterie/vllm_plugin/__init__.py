"""The part of coterie that runs inside vLLM: counts experts per KV block and returns them with the reply.

The counts connector transfers no KV.  It is one more child of vLLM's own `MultiConnector`, so it
composes with NIXL, Mooncake or offloading without knowing them, and no file of vLLM is patched:

- `connector`: the vLLM class; forwards each hook to one of the two sides and times it.
- `plan`: scheduler side; decides which blocks restart, which requests are summed, and makes envelopes.
- `capture`: worker side; the expert ids of a forward pass, from vLLM's own hook on each router.
- `blocks`: worker side; one row of counts per physical KV block.
- `output_ids`: scheduler side; the expert ids of single output tokens, for requests that ask.
- `slots`: the shared memory through which sums and ids reach the scheduler before the reply is built.
- `support`: what is refused at start, by name.
- `stats`: CPU time spent in the hooks, as Prometheus metrics of the engine.
"""

CONNECTOR = "CountsConnector"
MODULE = "coterie.vllm_plugin.connector"


def register() -> None:
    """Make the connector known by name to vLLM; called in each of its processes, any number of times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
