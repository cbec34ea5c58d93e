/**
 * Addresses on the Hub's host. Pure.
 */
import type { ISession, IStatus } from './tokens';

/** Where the Hub is, as JupyterLab's page says; `prefix` is empty without a Hub. */
export interface IHubLocation {
  host: string;
  prefix: string;
}

/**
 * Return the address of a path of the Hub's host, or null without a Hub or if it is not one:
 * the paths come from the service, and no other origin or scheme may be reached through them.
 */
export function hubHref(hub: IHubLocation, path: string | null): string | null {
  if (!hub.prefix || path === null || !/^\/(?![/\\])/.test(path)) {
    return null;
  }
  return hub.host.replace(/\/+$/, '') + path;
}

/** Return the address of the fGPU service's own page, or null without a Hub. */
export function servicePageHref(hub: IHubLocation): string | null {
  return hubHref(hub, hub.prefix.replace(/hub\/?$/, 'services/fgpu/'));
}

/** Return the address of the page that saves a session as an image, and ends it then if `end`; null without a Hub. */
export function saveHref(
  hub: IHubLocation,
  session: ISession,
  end = false
): string | null {
  const page = servicePageHref(hub);
  return page === null || session.id === null
    ? null
    : `${page}save/${session.id}${end ? '?end=1' : ''}`;
}

/** Return the address of a page about a session of the user, such as "rename" or "log"; null without a Hub. */
export function sessionHref(
  hub: IHubLocation,
  session: ISession,
  what: 'log' | 'rename'
): string | null {
  const page = servicePageHref(hub);
  return page === null || session.id === null
    ? null
    : `${page}${what}/${session.id}`;
}

/** Return the address of the form for this session's server, filled in as the session was; null without a Hub. */
export function againHref(hub: IHubLocation, status: IStatus | null): string | null {
  if (status === null || status.user === null || status.session === null) {
    return null;
  }
  const names = [status.user, status.session.server_name].filter(Boolean);
  const path = names.map(encodeURIComponent).join('/');
  return hubHref(hub, `${hub.prefix.replace(/\/*$/, '/')}spawn/${path}?again=1`);
}

/** Return the names of the servers of all of the user's sessions. */
function taken(status: IStatus): Set<string> {
  const all: ISession[] = [...status.others];
  if (status.session !== null) {
    all.push(status.session);
  }
  return new Set(all.map(session => session.server_name));
}

/**
 * Return the address of the Hub's form for one more session, or null without a Hub. `options` are in
 * the form when it opens: behind the #, because as a query they would start it without a look.
 */
export function formHref(
  hub: IHubLocation,
  status: IStatus,
  options: Record<string, string> = {}
): string | null {
  if (status.user === null) {
    return null;
  }
  const names = taken(status);
  let number = 2;
  while (names.has(`gpu-${number}`)) {
    number += 1;
  }
  const fields = new URLSearchParams(options).toString();
  const path = `${hub.prefix.replace(/\/*$/, '/')}spawn/${encodeURIComponent(status.user)}/gpu-${number}`;
  return hubHref(hub, fields ? `${path}#${fields}` : path);
}
