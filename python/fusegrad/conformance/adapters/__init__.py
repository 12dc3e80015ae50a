"""The implementations that this package knows: a name, and where its adapter is."""

ADAPTERS = {
    "eager": "pytorch:Eager",
    "compiled": "pytorch:Compiled",
    "torch": "pytorch:Torch",
    "sdpa": "pytorch:SDPA",
    "flex": "pytorch:Flex",
    "flex-eager": "pytorch:FlexEager",
    "liger": "peers:Liger",
    "liger-float32": "peers:LigerFloat32",
    "quack": "peers:Quack",
    "quack-inplace": "peers:QuackInplace",
    "cce": "peers:CCE",
    "cce-unfiltered": "peers:CCEUnfiltered",
    "fa4": "peers:FlashAttention4",
    "jax": "in_jax:JaxNN",
    "tokamax": "in_jax:Tokamax",
    "fusegrad-jax": "in_jax:FusegradJAX",
    "fusegrad": "ours:Fusegrad",
    "fusegrad-inplace": "ours:FusegradInplace",
}
