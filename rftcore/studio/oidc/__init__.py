"""Sign-in by a provider of OpenID Connect, such as Keycloak, Entra ID or Google (docs/decisions/0062).

The provider says who a person is. A file maps people to accounts of the database, and the account decides what they may do.
"""
