import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { processText } from './format';
import { peak, Plot, withNow } from './plot';
import type { IDetails, IProcess, IThisSession } from './tokens';

const USUAL_PERIOD_S = 10;

/** Memory and compute of the last minutes. */
export function History({ session, details, trans }: {
  session: IThisSession;
  details: IDetails;
  trans: TranslationBundle;
}): JSX.Element | null {
  const measured = details.history?.points ?? [];
  if (measured.length === 0) {
    return null;
  }
  const everyS = details.history?.every_s ?? USUAL_PERIOD_S;
  const points = withNow(measured, session, everyS);
  const minutes = Math.max(
    1,
    Math.round((points[points.length - 1]!.at_s - points[0]!.at_s) / 60)
  );
  const memory = points.map(p => ({ at_s: p.at_s, value: p.memory_used_mib }));
  const compute = points.map(p => ({ at_s: p.at_s, value: p.sm_percent }));
  const limit = session.gpu_memory_mib;
  const memoryPeak = peak(memory);
  const computePeak = peak(compute);
  const entitled =
    session.meter?.compute_entitled_percent ?? session.compute_percent;
  const last = trans._n('last minute', 'last %1 minutes', minutes);
  return (
    <>
      {limit !== null && limit > 0 && memoryPeak !== null && (
        <Plot
          points={memory}
          max={limit}
          everyS={everyS}
          label={trans.__(
            'GPU memory, %1: at most %2 of %3 MiB',
            last,
            memoryPeak,
            limit
          )}
          caption={trans.__('Memory, %1: at most %2 MiB', last, memoryPeak)}
        />
      )}
      {computePeak !== null && (
        <Plot
          points={compute}
          max={Math.max(entitled ?? 0, computePeak, 1) * 1.1}
          everyS={everyS}
          mark={entitled}
          label={trans.__(
            entitled === null
              ? 'Compute, %1: at most %2 % of the GPU'
              : 'Compute, %1: at most %2 % of the GPU; the dashed line is your share',
            last,
            Math.round(computePeak)
          )}
          caption={trans.__(
            entitled === null
              ? 'Compute, %1: at most %2 %'
              : 'Compute, %1: at most %2 %; dashed: your share',
            last,
            Math.round(computePeak)
          )}
        />
      )}
    </>
  );
}

/** The processes that hold GPU memory, the largest first, a kernel by its notebook; `own` is the current notebook. */
export function ProcessTable({ processes, trans, own }: {
  processes: IProcess[];
  trans: TranslationBundle;
  own?: string;
}): JSX.Element | null {
  return processes.length === 0 ? null : (
    <table className="jp-fgpu-Processes">
      <caption>{trans.__('GPU memory by process')}</caption>
      <thead>
        <tr>
          <th scope="col">{trans.__('Process')}</th>
          <th scope="col">{trans.__('Memory')}</th>
        </tr>
      </thead>
      <tbody>
        {processes.map(process => (
          <tr key={process.pid}>
            <td title={process.name ?? undefined}>
              {processText(process, own, trans)}
            </td>
            <td>
              {process.memory_mib === null
                ? trans.__('not known')
                : trans.__('%1 MiB', process.memory_mib)}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
