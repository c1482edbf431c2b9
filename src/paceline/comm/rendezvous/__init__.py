"""Rendezvous: ranks find each other and get a connected transport.

`environment` finds in the launcher's variables which rank this process is; ranks meet in a `round`, through a
`key_value_store`; `transport_setup` leads a rank through it, `topology` makes the transport. `view_group`
does it again for each view of a supervised job, whose members know each other's endpoints.
"""
