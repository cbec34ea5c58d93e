"""A limit on the tokens that a user may have."""

from __future__ import annotations

from jupyterhub import orm
from jupyterhub.apihandlers.users import UserTokenListAPIHandler
from tornado.web import HTTPError

MOST_TOKENS = 200
"""Tokens of one user, with those of the user's servers. Each is a row that the Hub keeps, and compares others with."""


class Tokens(UserTokenListAPIHandler):  # type: ignore[misc]
    """`/users/{name}/tokens`, as JupyterHub has it."""

    async def post(self, user_name: str) -> None:
        # JupyterHub removes those that have expired once an hour.
        orm.APIToken.purge_expired(self.db)
        user = self.find_user(user_name)
        own = self.db.query(orm.APIToken).filter_by(client_id="jupyterhub", user_id=user and user.id)
        if user is not None and own.count() >= MOST_TOKENS:
            raise HTTPError(
                429, f"A user may have {MOST_TOKENS} tokens; revoke some that are not used any more"
            )
        await super().post(user_name)
