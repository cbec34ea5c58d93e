"""A limit on the number of a user's API tokens."""

from __future__ import annotations

from jupyterhub import orm
from jupyterhub.apihandlers.users import UserTokenListAPIHandler
from tornado.web import HTTPError

MOST_TOKENS = 200
"""API tokens of one user, with those of the user's servers. Each is a row that token look-ups compare."""


class Tokens(UserTokenListAPIHandler):  # type: ignore[misc]
    """JupyterHub's `/users/{name}/tokens` with a limit."""

    async def post(self, user_name: str) -> None:
        # JupyterHub itself purges expired tokens only once an hour.
        orm.APIToken.purge_expired(self.db)
        user = self.find_user(user_name)
        own = self.db.query(orm.APIToken).filter_by(client_id="jupyterhub", user_id=user and user.id)
        if user is not None and own.count() >= MOST_TOKENS:
            raise HTTPError(
                429, f"A user may have {MOST_TOKENS} tokens; revoke some that are not used any more"
            )
        await super().post(user_name)
