"""The contract with callers: vgpud.proto, its generated code, conversions and the client."""
