"""What every route stands on: the rest of the controller, handed over once when the application is made."""

from dataclasses import dataclass, field

from aiohttp import web

from nearline.controller.durable.jobs import JobStore
from nearline.controller.durable.lease import LeaderLease
from nearline.controller.durable.limits import Limits
from nearline.controller.durable.redis_state import State
from nearline.controller.durable.registry import Registry
from nearline.controller.http.ports import FleetPort
from nearline.controller.metrics import Metrics
from nearline.controller.tenants import Tenants
from nearline.controller.text.grammars import GrammarChecker
from nearline.controller.text.models import TextModels
from nearline.protocol import Slo, SloClass, TenantId


@dataclass(frozen=True, slots=True)
class Door:
    """The front door's neighbours. `heartbeat_s` is how often a waiting stream shows a sign of life;
    `is_loopback` says that only this machine can reach us, `host_names` what it then may call us without keys, besides
    localhost and addresses."""

    runtime: FleetPort
    registry: Registry
    texts: TextModels
    jobs: JobStore
    state: State
    lease: LeaderLease
    metrics: Metrics = field(default_factory=Metrics)
    tenants: Tenants = field(default_factory=Tenants)
    limits: Limits = field(default_factory=Limits)
    grammars: GrammarChecker = field(default_factory=GrammarChecker)
    heartbeat_s: float = 3.0
    is_loopback: bool = True
    host_names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf something is generated. `slo` is promised before what the body asks for; None: the function's."""

    tenant: TenantId
    slo: Slo | None = None
    slo_cap: SloClass | None = None


DOOR: web.AppKey[Door] = web.AppKey("door", Door)
TENANT: web.RequestKey[TenantId] = web.RequestKey("tenant", TenantId)
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)


def door_of(request: web.Request) -> Door:
    return request.app[DOOR]


def tenant_of(request: web.Request) -> TenantId:
    return request[TENANT]


def caller_of(request: web.Request) -> Caller:
    tenant = tenant_of(request)
    return Caller(tenant, slo_cap=door_of(request).limits.slo_cap(tenant))
