"""No hang: a reward service over gRPC has answered a few calls, and nobody is connected to it."""

from concurrent import futures

import grpc


class Reward(grpc.GenericRpcHandler):
    def service(self, handler_call_details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request[::-1])


server = grpc.server(futures.ThreadPoolExecutor(4))
server.add_generic_rpc_handlers((Reward(),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    assert channel.unary_unary("/Reward/Score")(b"abc", timeout=10) == b"cba"
print("ready", flush=True)
server.wait_for_termination()
