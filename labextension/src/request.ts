import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

/** An answer other than 2xx; `message` can be shown. */
export class ResponseError extends Error {
  constructor(
    message: string,
    readonly status: number,
    /** Whether it came with the code of an error of ours, and not from a proxy in place of a server that is gone. */
    readonly coded = false
  ) {
    super(message);
    this.name = 'ResponseError';
  }
}

/**
 * Call the extension's own handlers on the user's Jupyter server.
 *
 * Rejects with ResponseError for an answer that is not 2xx, and with what ServerConnection gives
 * where there is no answer. The caller says what `T` is.
 */
export async function requestAPI<T>(
  path: string,
  init: RequestInit,
  settings: ServerConnection.ISettings
): Promise<T> {
  const url = URLExt.join(settings.baseUrl, 'fgpu/api', path);
  const response = await ServerConnection.makeRequest(url, init, settings);
  const text = await response.text();
  let body: any = null;
  try {
    body = JSON.parse(text);
  } catch {
    // A proxy's or a login page: its text is no message for the user.
  }
  if (!response.ok || body === null) {
    throw new ResponseError(
      body?.error?.message ?? body?.message ?? response.statusText,
      response.status,
      typeof body?.error?.code === 'string'
    );
  }
  return body as T;
}
