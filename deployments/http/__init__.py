"""The HTTP side, one concern a file. `deployments.gateway.create_app` puts them together; nothing here knows Ray."""
