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

/** Return the address of the page with a session's log; null without a Hub. */
export function logHref(hub: IHubLocation, session: ISession): string | null {
  const page = servicePageHref(hub);
  return page === null || session.id === null ? null : `${page}log/${session.id}`;
}

/** Return the address of the form for this session's server with the session's values; null without a Hub. */
export function restartHref(hub: IHubLocation, status: IStatus | null): string | null {
  if (status === null || status.user === null || status.session === null) {
    return null;
  }
  const names = [status.user, status.session.server_name].filter(Boolean);
  const path = names.map(encodeURIComponent).join('/');
  return hubHref(hub, `${hub.prefix.replace(/\/*$/, '/')}spawn/${path}?again=1`);
}

/**
 * Return the address of the Hub's form for one more session, filled with `options`; null without a Hub. The options
 * follow a #: as a query they would start the session at once.
 */
export function launchFormHref(
  hub: IHubLocation,
  status: IStatus,
  options: Record<string, string> = {}
): string | null {
  if (status.user === null) {
    return null;
  }
  const names = new Set([status.session, ...status.others].map(session => session?.server_name));
  let number = 2;
  while (names.has(`gpu-${number}`)) {
    number += 1;
  }
  const fields = new URLSearchParams(options).toString();
  const path = `${hub.prefix.replace(/\/*$/, '/')}spawn/${encodeURIComponent(status.user)}/gpu-${number}`;
  return hubHref(hub, fields ? `${path}#${fields}` : path);
}
