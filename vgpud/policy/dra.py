"""The table [dra] of the policy: how the node's GPUs are published to Kubernetes' dynamic resource
allocation.
"""

from typing import Literal

from pydantic import Field

from vgpud.policy.fields import PolicyTable


class DraSettings(PolicyTable):
    """The table [dra]. Each card is published in the form that its [[device]] rule allows."""

    enabled: bool = Field(
        False, description="whether cards are published to the cluster, and claims on them prepared"
    )
    auto: Literal["quota", "compute", "hardware", "device"] = Field(
        "quota",
        description="what cards of mode auto are published as: memory held by libvgpu, or by MPS, MIG "
        "instances, or whole",
    )
    check_seconds: float = Field(
        30.0,
        ge=0.2,
        le=3600.0,
        description="how often it is looked whether the cluster still has what was published, and the claims",
    )
